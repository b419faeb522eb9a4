"""Write docs/api.md from the docstrings of the public names: `python docs/make_api.py`.

`page()` returns the page as text. A test compares it with the file, so the two cannot differ.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import agent_wrapper
import rollout_backend

PAGE = Path(__file__).with_name("api.md")
_HEAD = """\
# API reference

Generated from the docstrings by `python docs/make_api.py`; do not edit.

Import these names from `rollout_backend` on the training side, and from `agent_wrapper` in the agent's image. Every
other name is internal and can change in any release.
"""
_ELSEWHERE = {"RolloutConfig": "Its fields are listed in [settings.md](settings.md)."}


def page() -> str:
    lines = [_HEAD]
    for package in (rollout_backend, agent_wrapper):
        lines += [f"## {package.__name__}", ""]
        public = {name: getattr(package, name) for name in package.__all__}
        errors = [value for value in public.values() if inspect.isclass(value) and issubclass(value, Exception)]
        for name, value in public.items():
            if value not in errors:
                lines += _section(name, value)
        lines += _errors(package, errors)
    return "\n".join(lines).rstrip() + "\n"


def _section(name: str, value: Any) -> Iterator[str]:
    source = inspect.getsource(value)
    node = ast.parse(source).body[0]
    yield from (f"### {name}", "")
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from (_signature(node), "", _text(node), "")
        return
    assert isinstance(node, ast.ClassDef)
    yield from (_text(node), "")
    if name in _ELSEWHERE:
        yield from (_ELSEWHERE[name], "")
        return
    fields = list(_fields(node))
    if fields:
        yield from ("| field | type | |", "| --- | --- | --- |", *fields, "")
    private = [base for base in value.__mro__[1:] if base.__name__.startswith("_")]
    classes = [node, *(ast.parse(inspect.getsource(base)).body[0] for base in private)]
    members = [member for each in classes if isinstance(each, ast.ClassDef) for member in each.body]
    for member in members:
        if not isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if member.name == "__init__":
            yield from (_signature(member, name), "", *([_text(member), ""] if ast.get_docstring(member) else []))
        elif not member.name.startswith("_") and ast.get_docstring(member):
            kinds = {ast.unparse(decorator) for decorator in member.decorator_list}
            if kinds & {"property", "cached_property"}:
                returned = f": {ast.unparse(member.returns)}" if member.returns is not None else ""
                yield from (f"**`{name}.{member.name}{returned}`**", "", _text(member), "")
            else:
                yield from (_signature(member, f"{name}.{member.name}"), "", _text(member), "")


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Yield a table row for each field of a dataclass, a model or an enumeration."""
    for member, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            name, kind = (
                member.target.id,
                re.sub(r"Annotated\[(.+), Field\(.*\)\]", r"\1", ast.unparse(member.annotation)),
            )
        elif isinstance(member, ast.Assign) and isinstance(member.targets[0], ast.Name):
            name, kind = member.targets[0].id, ast.unparse(member.value)
        else:
            continue
        if not name.startswith("_") and name != "model_config":
            described = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            meaning = " ".join(str(below.value.value).split()) if described else ""
            yield f"| `{name}` | `{_cell(kind)}` | {_cell(meaning)} |"


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str | None = None) -> str:
    arguments = node.args
    if name is not None and arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args.pop(0)
    for values in (arguments.defaults, arguments.kw_defaults):
        for i, default in enumerate(values):
            if isinstance(default, ast.Lambda):
                values[i] = ast.Constant(...)
    start = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    end = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    text = f"{start}{name or node.name}({ast.unparse(arguments)}){end}"
    return f"```text\n{text}\n```"


def _text(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """Return a docstring as Markdown, with its list of exceptions as a list."""
    text, _, raised = (ast.get_docstring(node) or "").partition("Raises:\n")
    raised = re.sub(r"\n\s{5,}", " ", raised)
    lines = [f"- `{kind}`: {why}" for kind, why in re.findall(r"^\s+(\w+): (.*)$", raised, flags=re.M)]
    return "\n".join([text.strip(), *(["", "Raises:", "", *lines] if lines else [])]).strip()


def _errors(package: ModuleType, errors: list[type[Exception]]) -> Iterator[str]:
    yield from (f"### Exceptions of {package.__name__}", "", "| exception | base | meaning |", "| --- | --- | --- |")
    for error in errors:
        yield f"| `{error.__name__}` | `{error.__bases__[0].__name__}` | {_cell(inspect.getdoc(error) or '')} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
