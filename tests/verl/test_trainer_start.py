"""A run that cannot start says what to change before verl starts an engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from anyio.from_thread import start_blocking_portal

from rollout_backend.errors import RolloutBackendError
from rollout_backend.serving.server_process import ServerProcess
from rollout_backend.verl.dataset import PayloadDataset
from rollout_backend.verl.sampler import RolloutSampler

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent
CLASS_KEY = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
OWN_KEY = "actor_rollout_ref.rollout.custom.rollout_backend"
WRONG: dict[str, tuple[list[str], dict[str, Any], list[str]]] = {
    # verl's overrides, the backend's settings, and the expected message.
    "no such class": ([f"{CLASS_KEY}=rollout_backend.verl.Manager"], {}, ["no such class", "CloudAgentLoopManager"]),
    "no such module": ([f"{CLASS_KEY}=nowhere.Manager"], {}, ["cannot be imported", "CloudAgentLoopManager"]),
    "no class": ([f"{CLASS_KEY}=null"], {}, [f"add +{CLASS_KEY}="]),
    "no settings": ([f"{OWN_KEY}=null"], {}, [f"+{OWN_KEY} is missing", "storage.bucket"]),
    "unknown setting": ([], {"group": {"sice": 3}}, [OWN_KEY, "group.sice: no such setting"]),
    "a reward of verl's": (
        ["reward.reward_model.enable=True"],
        {},
        ["reward.reward_model.enable=True", "computed by the agent"],
    ),
    "no such bucket": ([], {"storage": {"bucket": "not-there"}}, ["not-there"]),
    "no such model": (["actor_rollout_ref.model.path=acme/none"], {}, ["there is no folder acme/none", "on the hub"]),
}


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory, training: Any) -> Iterator[Any]:
    """A run whose settings are valid."""
    task = {"name": "task", "rewards": [0.0, 1.0, 0.25, 0.5]}
    would_start = training(tmp_path_factory.mktemp("ready"), [task], 1)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(would_start) as run:
        yield run


def overrides_of(case: str, ready: Any, folder: Path) -> list[str]:
    more, own, _ = WRONG[case]
    tree = yaml.safe_load(ready.own.read_text())
    for key, value in own.items():
        tree[key] = {**tree.get(key, {}), **value}
    settings = folder / "rollout_backend.yaml"
    settings.write_text(yaml.safe_dump(tree))
    return [f"++{OWN_KEY}={settings}", *(f"++{override}" for override in more)]


@pytest.mark.parametrize("case", WRONG)
def test_the_dataset_reports_wrong_settings(case, ready, tmp_path, monkeypatch):
    for name, value in ready.cloud.environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RolloutBackendError) as caught:
        PayloadDataset(str(ready.rows), None, ready.config(*overrides_of(case, ready, tmp_path)).data)
    for part in WRONG[case][2]:
        assert part in str(caught.value)


@pytest.mark.parametrize("case", ["no such class", "no such bucket"])
def test_the_sampler_reports_wrong_settings_with_any_dataset(case, ready, tmp_path, monkeypatch):
    for name, value in ready.cloud.environ.items():
        monkeypatch.setenv(name, value)
    trainer = ready.config(*overrides_of(case, ready, tmp_path)).trainer.v1
    with pytest.raises(RolloutBackendError) as caught:
        RolloutSampler("sync", trainer.sampler.sampler_kwargs, None, trainer_config=trainer.get("sync", {}))
    for part in WRONG[case][2]:
        assert part in str(caught.value)


@pytest.mark.slow
async def test_verl_ends_before_it_starts_an_engine_and_says_why(ready: Any, tmp_path: Path) -> None:
    """verl makes the sampler first, then the dataset. Each case differs from a valid run in one setting."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(ready.rows.read_text() + '{"question": "What is 3 + 4?"}\n')
    cases: dict[str, list[str]] = {"no payload": [f"data.train_files={rows}"]}
    said = {"no payload": ["rows.jsonl, line 2: there is no payload, only ['question']"]}
    verls = [f"data.custom_cls.{key}=null" for key in ("path", "name")]
    cases["verl's own dataset"] = [*overrides_of("no such bucket", ready, tmp_path), *verls]
    said["verl's own dataset"] = ["not-there"]
    file = tmp_path / "cases.json"
    hydra = [f"hydra.run.dir={tmp_path}", "hydra.output_subdir=null"]
    given = {name: [*ready.settings, *more, *hydra] for name, more in cases.items()}
    file.write_text(json.dumps(given))
    verl = ServerProcess(
        "verl", [sys.executable, str(HERE / "run_cases.py"), str(file)], tmp_path / "verl.log", ready.environ
    )
    await verl.start()
    try:
        assert await verl.wait() == 0, verl.log_tail()
    finally:
        await verl.stop(grace_s=20)
    log = verl.log.read_text(errors="replace")
    for name, parts in said.items():
        _, _, rest = log.partition(f"--- {name}\n")
        text, _, ended = rest.partition(f"--- {name} ended with code ")
        assert ended.startswith("1"), log[-3000:]
        for part in parts:
            assert part in text, f"{name}: {text[-3000:]}"
    assert not ready.engine_started
    assert not ready.run_dir.exists()
    await ready.leaves_nothing()
