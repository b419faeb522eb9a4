"""The `janitor` section."""

from __future__ import annotations

from rollout_backend.config.section import Seconds, Section


class JanitorConfig(Section):
    """A small process next to each run. If the run is killed, it deletes the queues that the run created and stops
    the open sessions. A run that ends normally does both, and ends its janitor."""

    enabled: bool = True
    """Start a janitor. If false, a killed run leaves its queues, and its sessions end at the runtime's idle
    timeout."""
    grace_s: Seconds = 300.0
    """Time from the run's death until the janitor acts, unless the run has restarted, under the same `run_id`."""
    lease_s: Seconds = 60.0
    """Duration of a manager's lease on its run, which it renews in the bucket every quarter of this. A start on
    another machine takes the run over only after the lease has expired; on the same machine a run whose process is
    dead restarts at once."""
