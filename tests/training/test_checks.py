"""What is found at a training service before anything is spent."""

import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ConfigError
from rollout_backend.training import checks
from rollout_backend.training.checks import check_service, describe_difference
from rollout_backend.training.tinker import TinkerService
from rollout_backend.workbench.local.scripted import BYTE_MODEL
from tests.emulators.tinker_emulator import TinkerEmulator
from tests.emulators.tiny_learner import TabularPolicy

CONTEXT = 32_768


@pytest.fixture
async def emulator(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TinkerEmulator]:
    # The SDK finds the tokenizer of this base model in its folder, and none of `nameless`.
    models = {str(BYTE_MODEL): TabularPolicy(range(6)), "nameless": TabularPolicy(range(6))}
    async with TinkerEmulator(models, poll_s=0.1, context_tokens=CONTEXT) as service:
        monkeypatch.setenv("TINKER_API_KEY", service.key)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        yield service


def make_config(**sections: Any) -> RolloutConfig:
    given = {
        "model": {"path": "m"},
        "storage": {"bucket": "bucket"},
        "runtime": {"kind": "process", "command": ["agent"]},
    }
    return RolloutConfig.parse(given | sections)


@pytest.fixture
def settings(emulator: TinkerEmulator) -> Callable[..., RolloutConfig]:
    def make(model: Path = BYTE_MODEL, **section: Any) -> RolloutConfig:
        service = {"base_url": emulator.url, "base_model": str(BYTE_MODEL), **section}
        return make_config(
            serving={"kind": "tinker"}, training_service=service, model={"path": str(model), "renderer": "chatml"}
        )

    return make


async def found(config: RolloutConfig, *, trains: bool = False) -> dict[str, list[str]]:
    levels: dict[str, list[str]] = {}
    for each in await check_service(config, trains=trains):
        levels.setdefault(each.level, []).append(f"{each.name}: {each.text}")
    return levels


@pytest.mark.parametrize("trains", [False, True])
async def test_a_service_with_the_model_and_its_tokenizer_is_fine(settings: Any, trains: bool) -> None:
    levels = await found(settings(), trains=trains)
    assert levels.keys() == {"ok", "unchecked"}, levels.get("problem")
    assert any("has the tokenizer of" in text for text in levels["ok"])


async def test_a_wrong_key_and_an_unknown_model_are_problems(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    [text] = (await found(settings(base_model="large")))["problem"]
    assert "does not sample 'large'. It samples: " in text
    [text] = (await found(settings(base_model="large"), trains=True))["problem"]
    assert "does not train 'large'" in text
    monkeypatch.setenv("TINKER_API_KEY", "tml-another")
    [text] = (await found(settings()))["problem"]
    assert "refuses the key in TINKER_API_KEY" in text
    monkeypatch.delenv("TINKER_API_KEY")
    [text] = (await found(settings()))["problem"]
    assert "TINKER_API_KEY is not set" in text


async def test_another_tokenizer_is_a_problem(settings: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(BYTE_MODEL, other)
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    ids = vocabulary["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    [text] = (await found(settings(other)))["problem"]
    assert "2 of " in text
    assert "ids differ" in text


async def test_a_tokenizer_that_cannot_be_found_is_not_compared(settings: Any) -> None:
    [text] = (await found(settings(base_model="nameless")))["warning"]
    assert "was not compared with it" in text


async def test_a_longer_context_than_the_services_is_a_problem(settings: Any) -> None:
    config = settings()
    model = config.model.model_copy(update={"context_length": 2 * CONTEXT})
    [text] = (await found(config.model_copy(update={"model": model})))["problem"]
    assert f"is above the service's {CONTEXT:,}" in text


async def test_a_service_that_is_silent_is_waited_for(
    settings: Any, emulator: TinkerEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_backend.training.checks._ANSWER_S", 0.2)
    emulator.faults.silent.add("get_server_capabilities")
    [text] = (await found(settings()))["warning"]
    assert "A run waits for it when it starts" in text


async def test_a_service_that_is_silent_to_samplers_is_not_waited_for(
    settings: Any, emulator: TinkerEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.faults.silent.add("create_sampling_session")
    config = settings()

    async def open_without_limit(service: TinkerService) -> TinkerService:
        # Only the silent call meets the short limit.
        monkeypatch.setattr(checks, "_ANSWER_S", 0.2)
        return await enter(service)

    enter = TinkerService.__aenter__
    monkeypatch.setattr(TinkerService, "__aenter__", open_without_limit)
    [text] = (await found(config))["warning"]
    assert "was not compared with it: no answer within 0.2 s" in text


def test_vocabularies_are_compared_by_id() -> None:
    assert describe_difference({"a": 0, "b": 1}, {"b": 1, "a": 0}) == ""
    assert describe_difference({"a": 0}, {"a": 0, "b": 1}) == "1 of 2 ids differ; id 1 is unknown here and 'b' there"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training_service": None}, "the section training_service is missing"),
        ({"serving": {"kind": "tinker", "servers": 2}}, "servers has no effect with kind=tinker"),
        ({"gateway": {"constrained_decoding": "allow"}}, "forces no format"),
        ({"gateway": {"max_images": 4}}, "is sent no images"),
        ({"model": {"path": "m", "routed_experts": True}}, "reports no routed experts"),
    ],
)
def test_what_a_service_cannot_do_is_refused_by_name(sections: dict[str, Any], message: str) -> None:
    given = {"serving": {"kind": "tinker"}, "training_service": {"base_model": "m"}, **sections}
    with pytest.raises(ConfigError, match=message):
        make_config(**{name: section for name, section in given.items() if section is not None})
