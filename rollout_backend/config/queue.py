"""The `queue` section."""

from __future__ import annotations

from pydantic import Field

from rollout_backend.config.section import Section


class QueueConfig(Section):
    enabled: bool = True
    """Announce results on SQS. If false, the backend finds them by listing only, which takes longer."""
    url: str | None = None
    """URL of an existing queue. Default: the run creates a queue and a dead-letter queue and deletes both at its
    end."""
    receivers: int = Field(default=2, ge=1, le=32)
    """Concurrent long polls. A backlog is received by more, as far as `collect.max_fetches` has room."""
    wait_s: int = Field(default=20, ge=0, le=20)
    """Maximum duration of one long poll."""
    visibility_s: int = Field(default=60, ge=5, le=43200)
    """Visibility timeout of a received message, extended while its rollout is fetched. The message reappears if this
    process dies before it deletes it."""
    max_receives: int = Field(default=5, ge=1, le=1000)
    """A message that was received this often without being deleted moves to the dead-letter queue. Applies to a queue
    that the run creates."""
