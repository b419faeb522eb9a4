"""Write the table of AWS calls in docs/deploy.md: `python docs/make_calls.py`.

`page()` returns the page as text. A test compares it with the file, so the two cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rollout_backend.workbench.deploy.calls import ADOPT, BUILD, DEPLOY, DOWN, Call

PAGE = Path(__file__).with_name("deploy.md")
_BEGIN, _END = "<!-- calls: python docs/make_calls.py -->", "<!-- end of calls -->"


def page() -> str:
    table = "\n".join(_lines())
    return re.sub(f"{_BEGIN}.*{_END}", lambda _: f"{_BEGIN}\n\n{table}\n\n{_END}", PAGE.read_text(), flags=re.S)


def _lines() -> Iterator[str]:
    yield "| command | call | what it does | IAM actions |"
    yield "| --- | --- | --- | --- |"
    for command, calls in (("deploy", DEPLOY), ("CodeBuild", BUILD), ("deploy --adopt", ADOPT), ("down", DOWN)):
        for call in calls:
            actions = ", ".join(f"`{action}`" for action in call.actions)
            yield f"| {command} | {call.name} | {call.why}{_when(call)} | {actions} |"


def _when(call: Call) -> str:
    if call.pins:
        return " (`runtime.qualifier`)"
    if call.sessions:
        return " (`training_service.kind: sagemaker`)"
    return f" (`--build {', '.join(call.only)}`)" if call.only and "code" not in call.only else ""


if __name__ == "__main__":
    PAGE.write_text(page())
