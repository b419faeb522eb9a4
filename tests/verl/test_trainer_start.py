"""A run that cannot start says what to change before verl starts an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_backend.errors import RolloutBackendError
from rollout_backend.verl.dataset import PayloadDataset
from rollout_backend.verl.sampler import RolloutSampler

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

CLASS_KEY = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
OWN_KEY = "actor_rollout_ref.rollout.custom.rollout_backend"
WRONG: dict[str, tuple[list[str], dict[str, Any], list[str]]] = {
    # verl's overrides, the backend's settings, and the expected message.
    "no such class": ([f"{CLASS_KEY}=rollout_backend.verl.Manager"], {}, ["no such class", "CloudAgentLoopManager"]),
    "no such module": ([f"{CLASS_KEY}=nowhere.Manager"], {}, ["cannot be imported", "CloudAgentLoopManager"]),
    "no class": ([f"{CLASS_KEY}=null"], {}, [f"add +{CLASS_KEY}="]),
    "unknown setting": ([], {"group": {"sice": 3}}, [OWN_KEY, "group.sice: no such setting"]),
    "a reward of verl's": (
        ["reward.reward_model.enable=True"],
        {},
        ["reward.reward_model.enable=True", "computed by the agent"],
    ),
    "no such bucket": ([], {"storage": {"bucket": "not-there"}}, ["not-there"]),
    "no such model": (["actor_rollout_ref.model.path=acme/none"], {}, ["there is no folder acme/none", "on the hub"]),
}


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
