"""Checks of the whole source: no input is executed, and no key is printed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for folder in ("agent_wrapper", "rollout_backend", "examples", "benchmarks", "docs")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
# What turns bytes into objects that run, or text into code.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}
SAFE_YAML = {"safe_load", "safe_load_all", "safe_dump", "dump", "YAMLError"}


def faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                if module.partition(".")[0] in MODULES:
                    yield module
                if module == "yaml":
                    yield from (f"yaml.{name.name}" for name in names if name.name not in SAFE_YAML)
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield f"{name}()"
            case ast.Attribute(value=ast.Name(id="yaml"), attr=name) if "load" in name and name not in SAFE_YAML:
                yield f"yaml.{name}"
            case ast.Call(keywords=keywords):
                given = {word.arg: word.value for word in keywords}
                if isinstance(flag := given.get("allow_pickle"), ast.Constant) and flag.value:
                    yield "allow_pickle"
                if isinstance(flag := given.get("weights_only"), ast.Constant) and flag.value is False:
                    yield "weights_only=False"
                if isinstance(flag := given.get("shell"), ast.Constant) and flag.value is True:
                    yield "shell=True"
                if isinstance(flag := given.get("verify"), ast.Constant) and flag.value is False:
                    yield "verify=False"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled_evaluated_or_loaded_unsafely(path: Path) -> None:
    assert list(faults(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as c",
        "def f():\n    import dill.source",
        "eval('1')",
        "yaml.load(x)",
        "from yaml import unsafe_load",
        "np.load(x, allow_pickle=True)",
        "torch.load(x, weights_only=False)",
        "run(x, shell=True)",
        "httpx.get(x, verify=False)",
    ],
)
def test_the_check_finds_unsafe_code(code: str) -> None:
    assert list(faults(ast.parse(code)))
