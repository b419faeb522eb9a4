"""Check S3 for the results of overdue rollouts before settling them without one.

Invariants:

- a failed request does not prove absence: a result is absent only after the agent protocol's own source, if it has
  one, has answered, and then S3 for both the result and the failure marker of the attempt;
- an answer counts only for the attempt that was current when the check started, even after retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

from rollout_backend.errors import StoreError
from rollout_backend.run.collect.fetcher import ResultSink
from rollout_backend.run.step.rollout_task import RolloutTask, StepContext

log = logging.getLogger(__name__)

# Above this number of rollouts, the check lists S3 first: one call returns 1,000 keys.
_LISTED = 50
# Limits the last check, which starts at the step's deadline.
_DEADLINE_S = 15.0


class AbsenceCheck:
    """Checks whether results of one step's overdue rollouts exist."""

    def __init__(self, context: StepContext, sink: ResultSink) -> None:
        self._context = context
        self._buffer = context.services.buffer
        self._sink = sink
        self._source = context.services.dispatcher.source
        self._pending: set[RolloutTask] = set()
        self._checks: set[asyncio.Task[None]] = set()
        # A rollout's result and marker are fetched in succession. If the other requests of a large batch ran in
        # between, a result could be written seconds after S3 reported it as absent.
        self._asking = asyncio.Semaphore(self._buffer.max_fetches)

    def start(self, rollouts: Iterable[RolloutTask], absent: Callable[[RolloutTask], None]) -> None:
        """Check rollouts in the background until S3 answers for each or the step's deadline passes. See `ask`."""
        fresh = {each: each.entry.attempt for each in rollouts if each not in self._pending}
        self._pending.update(fresh)
        if fresh:
            check = asyncio.create_task(self._retry(fresh, absent))
            self._checks.add(check)
            check.add_done_callback(self._checks.discard)
            check.add_done_callback(self._context.early_end.abort_on_failure)

    async def _retry(self, rollouts: dict[RolloutTask, int], absent: Callable[[RolloutTask], None]) -> None:
        # The error is raised at the step's deadline, which settles these rollouts.
        with contextlib.suppress(StoreError):
            await self._context.plan.retry(lambda: self.ask(rollouts, absent))
        self._context.changed.set()

    def cancel(self) -> None:
        """Cancel the background checks."""
        for check in self._checks:
            check.cancel()

    async def wait(self) -> None:
        """Wait until every background check has ended."""
        await asyncio.gather(*self._checks, return_exceptions=True)

    async def finish(self, rollouts: Iterable[RolloutTask], absent: Callable[[RolloutTask], None]) -> None:
        """Check rollouts once, at the step's deadline."""
        self.cancel()
        asked = {each: each.entry.attempt for each in rollouts}
        limit_s, services = _DEADLINE_S, self._context.services
        if self._source is not None:
            # Containers are polled at the rate of invokes, just as they are then stopped at the rate of stops.
            polls_s = len(asked) / services.dispatcher.calls.polls_per_s
            limit_s += min(polls_s, services.config.timeouts.publish_grace_s)
        try:
            async with asyncio.timeout(limit_s):
                await self.ask(asked, absent)
        except (StoreError, TimeoutError) as error:
            log.warning("step %s is out of time: %s", self._context.request.name, error or "no answer in time")

    async def ask(self, rollouts: dict[RolloutTask, int], absent: Callable[[RolloutTask], None]) -> None:
        """Ask once for each of these attempts, and receive the results that exist. Remove rollouts that were answered
        or whose attempts were abandoned, and call `absent` as soon as a result is known not to exist.

        Raises:
            StoreError: some rollouts were not answered, and are left in `rollouts`.
        """
        listed: set[str] | None = None
        # A source writes its results after the listing.
        if len(rollouts) > _LISTED and self._source is None:
            try:
                listed = await self._buffer.list_results(self._sink)
            except StoreError as error:
                log.warning("%s; the results are requested one by one", error)

        async def ask(rollout: RolloutTask) -> None:
            entry, attempt, rollout_id = rollout.entry, rollouts[rollout], rollout.rollout_id
            source, session_id = self._source, entry.session_id
            # The agent protocol's own source may write the result.
            if entry.attempt == attempt and source is not None and session_id is not None:
                answered = await source.find_result(session_id, ended=entry.session_end is not None)
                if not answered:
                    return
            if entry.attempt == attempt and (listed is None or rollout_id in listed):
                async with self._asking:
                    if not await self._buffer.fetch_by_key(self._sink, rollout_id, attempt):
                        return
            del rollouts[rollout]
            self._pending.discard(rollout)
            if entry.awaits_result and entry.attempt == attempt:
                absent(rollout)
            rollout.watch_time()

        await asyncio.gather(*(ask(rollout) for rollout in sorted(rollouts, key=lambda each: each.rollout_id)))
        if rollouts:
            asked = "S3" if self._source is None else "S3, or what holds the agents' results,"
            raise StoreError(f"{asked} did not answer for {len(rollouts)} rollouts that are out of time")
