"""Write docs/contract.schema.json from the types of the contract: `python docs/make_contract_schema.py`.

`page()` returns it as text. A test compares it with the file, so the two cannot differ.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from agent_wrapper.contract import REQUEST_FIELD, Rollout, RolloutRequest, Trajectory, messages, objects

PAGE = Path(__file__).with_name("contract.schema.json")
_EXCHANGED = (RolloutRequest, Trajectory, Rollout)


def page() -> str:
    _, schema = models_json_schema([(kind, "validation") for kind in _EXCHANGED], ref_template="#/$defs/{model}")
    definitions: dict[str, Any] = schema["$defs"]
    for module in (objects, messages):
        for name, field, text in _descriptions(module):
            if name in definitions:
                definitions[name]["properties"][field]["description"] = text
    definitions["Invoke"] = {
        "title": "Invoke",
        "description": f"The body of POST /invocations. All fields but `{REQUEST_FIELD}` belong to the agent.",
        "type": "object",
        "properties": {REQUEST_FIELD: {"$ref": "#/$defs/RolloutRequest"}},
        "required": [REQUEST_FIELD],
    }
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The container contract of rollout-backend",
        "description": "Generated from agent_wrapper/contract by `python docs/make_contract_schema.py`; do not edit.",
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in ("Invoke", "Trajectory", "Rollout")],
        "$defs": dict(sorted(definitions.items())),
    }
    return json.dumps(_plain(whole), indent=2, ensure_ascii=False) + "\n"


def _descriptions(module: Any) -> Iterator[tuple[str, str, str]]:
    """Return class, field and description of each field that a comment or a docstring describes."""
    source = inspect.getsource(module)
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, following in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            comment = re.search(r"  # (?!noqa)(.*)$", lines[(field.end_lineno or 1) - 1])
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                yield node.name, field.target.id, " ".join(str(following.value.value).split())
            elif comment:
                yield node.name, field.target.id, comment[1]


def _plain(value: Any) -> Any:
    """Join the lines of descriptions, and drop titles that repeat a field's name."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for name, item in value.items():
        if name == "title" and isinstance(item, str) and "properties" not in value and "$defs" not in value:
            continue
        if name == "description" and isinstance(item, str):
            item = re.sub(r"(?<!\n)\n(?!\n)", " ", item)
        found[name] = _plain(item)
    return found


if __name__ == "__main__":
    PAGE.write_text(page())
