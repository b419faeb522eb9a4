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


def read_by_dataset(config: Any, rows: Path) -> None:
    PayloadDataset(str(rows), None, config.data)


def read_by_sampler(config: Any, rows: Path) -> None:
    v1 = config.trainer.v1
    RolloutSampler("sync", v1.sampler.sampler_kwargs, None, trainer_config=v1.get("sync", {}))


@pytest.mark.parametrize(
    ("read", "case"),
    [
        *((read_by_dataset, case) for case in WRONG),
        *((read_by_sampler, case) for case in ("no such class", "no such bucket")),  # with a dataset of verl's
    ],
)
def test_wrong_settings_are_reported(read, case, ready, tmp_path, monkeypatch):
    for name, value in ready.cloud.environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RolloutBackendError) as caught:
        read(ready.config(*overrides_of(case, ready, tmp_path)), ready.rows)
    for part in WRONG[case][2]:
        assert part in str(caught.value)
