"""The `collect` section."""

from __future__ import annotations

from pydantic import Field

from rollout_backend.config.section import Seconds, Section


class CollectConfig(Section):
    max_fetches: int = Field(default=64, ge=1)
    """Concurrent fetches from S3. About as many further announcements are received and wait; the rest of a backlog
    stays in the queue."""
    list_after_idle_s: Seconds = 10.0
    """The backend lists the step's prefix after this many seconds without an announcement, and at least every three
    times as many seconds. So a lost announcement delays its result by at most three times this."""
    list_interval_s: Seconds = 1.0
    """Interval between listings of the prefix while the queue is disabled."""
