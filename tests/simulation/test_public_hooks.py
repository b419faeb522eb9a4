"""The simulator reaches the production code through public names only, so the code behind them can be rearranged."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

SIMULATION = Path(__file__).parent
MODULES = [path for path in sorted(SIMULATION.rglob("*.py")) if not path.name.startswith(("test_", "conftest"))]
OURS = ("rollout_backend.", "tests.simulation.")
REPLACE = {"patch", "object", "dict", "setattr", "getattr", "delattr"}  # `object` of `patch.object`


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") and part != "_" for part in name.split("."))


def own_names(body: ast.AST) -> set[str]:
    """Return the private names that a class defines: its methods and attributes."""
    names = {node.name for node in ast.walk(body) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(body):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return {name for name in names if is_private(name)}


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


class PrivateUses(ast.NodeVisitor):
    """Finds the private names of other classes and modules in the source of a module."""

    def __init__(self, source: str) -> None:
        self.found: list[str] = []
        self.modules: dict[str, str] = {}  # by imported name
        self.own: list[set[str]] = []  # the private names of the classes around the current node
        self.visit(ast.parse(source))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.add(*[f"{node.module}.{alias.name}" for alias in node.names])
        self.modules |= {alias.asname or alias.name: str(node.module) for alias in node.names}

    def visit_Import(self, node: ast.Import) -> None:
        self.add(*[alias.name for alias in node.names])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        own = own_names(node)
        for base in self.bases(node):
            names = own_names(ast.parse(textwrap.dedent(inspect.getsource(base))))
            if base.__module__.startswith("tests.simulation."):
                own |= names
            else:
                self.add(*[f"{node.name} overrides {name}" for name in sorted(own & names)], private=True)
        self.own.append(own)
        self.generic_visit(node)
        self.own.pop()

    def bases(self, node: ast.ClassDef) -> Iterator[type]:
        """Return the classes of this project that a class inherits from."""
        for base in node.bases:
            if isinstance(base, ast.Name) and self.modules.get(base.id, "").startswith(OURS):
                found = getattr(importlib.import_module(self.modules[base.id]), base.id)
                yield from (each for each in found.__mro__ if each.__module__.startswith(OURS))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not (self.own and is_self(node.value) and node.attr in self.own[-1]):
            self.add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in REPLACE:
            strings = [each.value for each in node.args if isinstance(each, ast.Constant)]
            self.add(*[text for text in strings if isinstance(text, str)])
        self.generic_visit(node)

    def add(self, *names: str, private: bool = False) -> None:
        self.found += [name for name in names if private or is_private(name)]


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(SIMULATION)))
def test_simulation_uses_public_names_only(module):
    assert PrivateUses(module.read_text()).found == []


BUFFER = "from rollout_backend.run.collect.buffer import RolloutBuffer\n"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from rollout_backend.run.collect.buffer import _T", "rollout_backend.run.collect.buffer._T"),
        ("import rollout_backend._private", "rollout_backend._private"),
        ("buffer._sinks", "_sinks"),
        ("patch.object(RolloutBuffer, '_receive', broken)", "_receive"),
        ("patch('rollout_backend.run.collect.buffer._T', broken)", "rollout_backend.run.collect.buffer._T"),
        ("setattr(buffer, '_sinks', {})", "_sinks"),
        ("def broken(self: RolloutBuffer):\n    return self._sinks", "_sinks"),
        (f"{BUFFER}class B(RolloutBuffer):\n    def f(self):\n        return self._sinks", "_sinks"),
        (f"{BUFFER}class B(RolloutBuffer):\n    def f(self):\n        super()._receive()", "_receive"),
        (f"{BUFFER}class B(RolloutBuffer):\n    def _receive(self): ...", "B overrides _receive"),
        (f"{BUFFER}class B(RolloutBuffer):\n    def f(self):\n        self._sinks = {{}}", "B overrides _sinks"),
    ],
)
def test_private_names_are_found(source, found):
    assert PrivateUses(source).found == [found]


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def __init__(self):\n        self._a = 1\n    def f(self):\n        return self._a",
        "patch.object(Dispatcher, '__init__', broken)",
        "[_ for _ in ()]",
        f"{BUFFER}class B(RolloutBuffer):\n    def _f(self):\n        self._f()",
    ],
)
def test_own_private_names_are_allowed(source):
    assert PrivateUses(source).found == []
