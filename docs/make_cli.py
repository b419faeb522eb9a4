"""Write docs/cli.md from the parser of the `rollout` command: `python docs/make_cli.py`.

`page()` returns the page as text. A test compares it with the file, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from rollout_backend.cli import app

PAGE = Path(__file__).with_name("cli.md")
_TYPES = {"int": "N", "int range": "N", "float": "N", "str": "TEXT"}
_HEAD = """\
# Command line

Generated from the parser by `python docs/make_cli.py`; do not edit.

`rollout COMMAND --help` prints the same. Errors and logs go to stderr; `ROLLOUT_LOG_LEVEL=INFO` shows more of them.
"""


def page() -> str:
    lines = [_HEAD]
    for name, command in _commands(typer.main.get_command(app), "rollout"):
        lines += [f"## {name}", "", *_section(name, command)]
    return "\n".join(lines).rstrip() + "\n"


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each command with its full name, and a group that has options of its own."""
    members = getattr(command, "commands", {})
    if not members or command.params:
        yield name, command
    for sub, member in members.items():
        yield from _commands(member, f"{name} {sub}")


def _section(name: str, command: Any) -> Iterator[str]:
    context = typer.Context(command)
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    words = [name, *(_argument(each) for each in arguments), *(["[OPTIONS]"] if options else [])]
    if hasattr(command, "commands"):
        words.append("COMMAND")
    yield from (f"```text\n{' '.join(words)}\n```", "", command.help.strip(), "")
    if arguments:
        yield from ("| argument | |", "| --- | --- |")
        yield from (f"| `{_argument(each)}` | {_cell(each.help)} |" for each in arguments)
        yield ""
    if options:
        yield from ("| option | default | |", "| --- | --- | --- |")
        for option in options:
            value = "" if option.is_flag else f" {_value(option.display_type_rich(ctx=context))}"
            yield f"| `{', '.join(option.opts)}{value}` | {_default(option)} | {_cell(option.help)} |"
        yield ""


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _value(shown: str) -> str:
    """Return an option's metavar: its own, its choices, or the name of its type."""
    kind = shown.strip("<>")
    return _cell(shown if kind == shown else kind if "|" in kind else _TYPES.get(kind, kind.upper()))


def _default(option: Any) -> str:
    if option.required:
        return "required"
    return "" if option.is_flag or option.default in (None, "", [], ()) else f"`{option.default}`"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
