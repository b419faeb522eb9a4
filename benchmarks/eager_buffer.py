"""verl's replay buffer, polled as often as this backend polls it, so that both wait equally for a finished batch.

verl loads this file by its path. Its default is a poll every 2 s.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class EagerReplayBuffer(ReplayBuffer):  # type: ignore[misc]
    def __init__(self, **verl_arguments: Any) -> None:
        super().__init__(poll_interval=0.25, **verl_arguments)
