"""Violations that the simulated services observe. `checks` reports them at the end of a history."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Evidence:
    """Each list is empty if its invariant holds."""

    in_part: list[str] = field(default_factory=list)
    """Rollouts of which the gateway returned the last calls as the whole trajectory."""
    wasted: list[str] = field(default_factory=list)
    """Rollouts that were started again, or closed, while their agent was running."""
    fenced_off: list[str] = field(default_factory=list)
    """Actions of managers that had lost the run."""
    unrecorded: list[str] = field(default_factory=list)
    """Rollouts that were started without being in the manifest in S3."""
    sampled_on: list[str] = field(default_factory=list)
    """Rollouts whose agents sampled after their session was closed."""
    stopped_in_vain: list[str] = field(default_factory=list)
    """Ids that were stopped but never invoked, although no log was lost."""
    read_twice: list[str] = field(default_factory=list)
    """Results that one trainer fetched twice at the same time."""
    used_twice: list[str] = field(default_factory=list)
    """Ids of sessions that were started again after a stop."""
    scored_without: list[str] = field(default_factory=list)
    """Rollouts that were scored without the artifacts that their agent published."""
    admitted: list[str] = field(default_factory=list)
    """Calls that a queue admitted above their rates or before others."""

    def violation(self) -> str | None:
        """Return the first invariant that does not hold; None if all do."""
        vain = self.stopped_in_vain
        for found, what in (
            (self.in_part, f"the rest of a trajectory is returned as the whole: {self.in_part}"),
            (self.wasted, f"run again while an agent was running: {self.wasted}"),
            (self.fenced_off, f"two managers act at once: {self.fenced_off}"),
            (self.unrecorded, f"started without being in a manifest: {self.unrecorded}"),
            (self.sampled_on, f"agents sampled after their session was closed: {self.sampled_on}"),
            (vain, f"{len(vain)} sessions were stopped without an invoke, such as {vain[:1]}"),
            (self.read_twice, f"fetched twice at the same time: {self.read_twice}"),
            (self.used_twice, f"sessions were started again after their end: {self.used_twice}"),
            (self.admitted, f"calls are admitted wrongly: {self.admitted[:3]}"),
            (self.scored_without, f"scored without their artifacts: {self.scored_without}"),
        ):
            if found:
                return what
        return None
