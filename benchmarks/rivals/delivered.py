"""Print what a trainer has of a step. It needs the standard library only: rivals' environments run it."""

from __future__ import annotations

import json
from typing import Any


def hand_over(group: str, reward: float | None, **whose: Any) -> None:
    """Print a rollout that is trained, with its `tokens`, or the `session` whose tokens the gateway has."""
    print(json.dumps({"group": group, "reward": reward, **whose}), flush=True)


def ended(notes: dict[str, int]) -> None:
    """Print that the step ended by itself, and why rollouts are missing."""
    print(json.dumps({"ended": notes}), flush=True)
