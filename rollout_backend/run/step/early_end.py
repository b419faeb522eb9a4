"""End a step early."""

import asyncio

from rollout_backend.errors import CloudLost, RunHeld


class EarlyEnd:
    """Whether and why a step ends early. The step settles its rollouts once `requested` is set."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.leave_open = False
        """True if the sessions belong to another manager, or the cloud has ended with them."""
        self.requested = asyncio.Event()

    def abort(self, error: BaseException) -> None:
        """End the step now, and settle open rollouts as lost to the infrastructure. `Step.run` raises the first
        error, but a later RunHeld or CloudLost replaces it: the sessions then belong to another manager or are gone.
        """
        leave_open = isinstance(error, (RunHeld, CloudLost))
        if self.error is None or leave_open:
            self.error = error
        self.leave_open = self.leave_open or leave_open
        self.requested.set()

    def abort_on_failure(self, task: asyncio.Task[None]) -> None:
        """End the step with the error of a background task, which nothing awaits. Otherwise a step without a queue
        would notice expired credentials, for example, only at its deadline."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.abort(error)
