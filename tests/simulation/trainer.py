"""A trainer process, as the simulated services see it: alive or killed, and on which machine."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_backend.run.lease import LeaseHolder


class Killed(BaseException):
    """The trainer was killed: its calls have no effect."""


@dataclass
class Trainer:
    """One trainer process and its gateway."""

    number: int
    machine: str = "here"
    alive: bool = True
    ended_at: float = 0.0
    cut_off_until: float = 0.0  # virtual time until which it cannot reach S3

    @property
    def id(self) -> str:
        """Return its id as a holder of the run."""
        return f"trainer-{self.number}"

    def holder(self, since: float) -> LeaseHolder:
        """Return what its lease names. `since` in unix seconds."""
        return LeaseHolder(id=self.id, host=self.machine, machine=self.machine, pid=self.number, since=since)

    def require_alive(self) -> None:
        """Raise Killed if the trainer was killed: it can call nothing any more."""
        if not self.alive:
            raise Killed
