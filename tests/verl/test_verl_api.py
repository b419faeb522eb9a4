"""The names of verl that this backend uses, in the installed verl, and in versions that lack them."""

from __future__ import annotations

import ast
import importlib
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import verl

import rollout_backend.verl
from rollout_backend.errors import ConfigError
from rollout_backend.verl import verl_api
from rollout_backend.verl.vllm_middleware import attach

[VERL] = map(Path, verl.__path__)
[BACKEND] = map(Path, rollout_backend.verl.__path__)


def test_the_installed_version_is_supported_and_has_every_name(caplog: pytest.LogCaptureFixture) -> None:
    verl_api.check_version()
    assert not caplog.records
    for name in verl_api._NAMES:
        assert getattr(getattr(verl_api, name), "__name__", name) == name


@pytest.mark.parametrize("version", ["0.8.0", "0.9.0", "0.9.0.dev0"])
def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(verl_api, "_installed", lambda: version)
    with pytest.raises(ConfigError, match=rf"verl {version} is too old for this backend: install verl 0\.9\.1"):
        verl_api.check_version()


@pytest.mark.parametrize("version", ["0.9.2", "0.10.0.dev0", "1.0"])
def test_a_newer_version_with_every_name_gets_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setattr(verl_api, "_installed", lambda: version)
    with caplog.at_level(logging.WARNING):
        verl_api.check_version()
    assert caplog.messages == [f"verl {version} is not tested with this backend: verl 0.9.1 is supported"]


@pytest.mark.parametrize("module", ["verl.utils.fs", "verl.utils.gone"])
def test_a_newer_version_that_lacks_a_name_is_refused(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setattr(verl_api, "_installed", lambda: "0.10.0")
    monkeypatch.setitem(verl_api._NAMES, "moved", module)
    with pytest.raises(ConfigError, match=rf"verl 0\.10\.0 has no {module}\.moved .*: install verl 0\.9\.1"):
        verl_api.check_version()


@pytest.mark.parametrize("name", verl_api._NAMES)
def test_a_newer_version_that_lacks_any_of_the_names_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(verl_api, "_installed", lambda: "0.10.0")
    module = importlib.import_module(verl_api._NAMES[name])
    monkeypatch.setattr(verl_api, "importlib", SimpleNamespace(import_module=lambda path: _without(path, name)))
    with pytest.raises(
        ConfigError, match=rf"verl 0\.10\.0 has no {module.__name__}\.{name} .*: install verl 0\.9\.1"
    ):
        verl_api.check_version()


def _without(path: str, name: str) -> object:
    module = importlib.import_module(path)
    return SimpleNamespace(**{key: value for key, value in vars(module).items() if key != name})


@pytest.mark.parametrize("path", verl_api._CALLS)
@pytest.mark.parametrize("change", ["fewer", "more"])
def test_a_newer_version_with_other_parameters_is_refused(
    monkeypatch: pytest.MonkeyPatch, path: str, change: str
) -> None:
    name, _, method = path.partition(".")
    changed = (lambda: None) if change == "fewer" else (lambda *args, new, **kwargs: None)
    found: object = changed
    if method:
        found = type(name, (getattr(verl_api, name),), {method: changed})
    monkeypatch.setattr(verl_api, "_installed", lambda: "0.10.0")
    monkeypatch.setattr(verl_api, name, found, raising=False)
    monkeypatch.setattr(verl_api, "__getattr__", lambda wanted: found if wanted == name else _plain(wanted))
    if change == "more" and method == "__init__":
        # verl passes what it adds to its buffers.
        verl_api.check_version()
        return
    with pytest.raises(ConfigError, match=rf"has no .*\.{path} with the arguments of 0\.9\.1 \(.*\), which"):
        verl_api.check_version()


_plain = verl_api.__getattr__


def test_an_object_that_lacks_an_attribute_is_an_error_with_the_version() -> None:
    with pytest.raises(ConfigError, match=r"verl 0\.9\.1 has no SimpleNamespace\._load_balancer, which .* uses"):
        verl_api.load_balancer(SimpleNamespace())
    for lacking in ({"engine": SimpleNamespace()}, {"global_steps": 1}):
        with pytest.raises(ConfigError, match=r"has no SimpleNamespace\.(engine|global_steps)"):
            attach(SimpleNamespace(**lacking))


def test_constants_are_those_of_verl() -> None:
    """verl's modules that have them import SGLang and vLLM, which are not installed here."""
    assigned = {}
    for engine in ("sglang", "vllm"):
        source = (VERL / "workers" / "rollout" / f"{engine}_rollout" / "utils.py").read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                assigned[ast.unparse(node.targets[0])] = node.value.value
    assert assigned["SGLANG_LORA_NAME"] == verl_api.ADAPTER
    assert assigned["VLLM_LORA_INT_ID"] == 123  # as in tests/verl/vllm_adapter_server.py
    assert assigned["VLLM_LORA_PATH"] == "simon_lora_path"


def test_only_verl_api_imports_verl() -> None:
    for file in BACKEND.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported = [name for name in names if name and name.partition(".")[0] == "verl"]
            assert not imported or file.name == "verl_api.py", f"{file.name} imports {imported}"
