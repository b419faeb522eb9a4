"""Ask for the results of rollouts that ran out of time, before they are settled without one.

Invariants:

- "could not be asked" is not "nothing is there": a rollout is absent only once S3 has answered for its result and for
  the failure marker of its attempt, and before that the agent protocol's own source, if it has one;
- an answer counts only for the attempt that was current when its check started, however often S3 was asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

from rollout_backend.collect.fetcher import ResultSink
from rollout_backend.core.ledger import LedgerEntry
from rollout_backend.errors import StoreError
from rollout_backend.step.rollout_task import RolloutTask, StepContext

log = logging.getLogger(__name__)

_LISTED = 50  # from this many rollouts on, S3 is listed first: a call returns 1,000 keys
_DEADLINE_S = 15.0  # in which S3 answers the last check, once the step's deadline has passed


class AbsenceCheck:
    """The rollouts of one step that are out of time, until it is confirmed whether their results exist."""

    def __init__(self, context: StepContext, sink: ResultSink) -> None:
        self._context = context
        self._buffer = context.services.buffer
        self._sink = sink
        self._source = context.services.dispatcher.source
        self._pending: set[RolloutTask] = set()
        self._checks: set[asyncio.Task[None]] = set()
        # A rollout's result and marker are fetched in succession: if the requests of a large batch queued first, a
        # result could be written seconds after S3 had said that it is absent.
        self._asking = asyncio.Semaphore(self._buffer.max_fetches)

    def start(self, rollouts: Iterable[RolloutTask], absent: Callable[[RolloutTask], None]) -> None:
        """Check rollouts in the background, until each is answered or the step's deadline passes; see `ask`."""
        fresh = {each: each.entry.attempt for each in rollouts if each not in self._pending}
        self._pending.update(fresh)
        if fresh:
            check = asyncio.create_task(self._retry(fresh, absent))
            self._checks.add(check)
            check.add_done_callback(self._checks.discard)
            check.add_done_callback(self._context.abort_on_failure)

    async def _retry(self, rollouts: dict[RolloutTask, int], absent: Callable[[RolloutTask], None]) -> None:
        with contextlib.suppress(StoreError):  # at the step's deadline, which settles them
            await self._context.plan.retry(lambda: self.ask(rollouts, absent))
        self._context.changed.set()

    def cancel(self) -> None:
        """Cancel the checks in the background."""
        for check in self._checks:
            check.cancel()

    async def wait(self) -> None:
        """Wait until every check in the background has ended."""
        await asyncio.gather(*self._checks, return_exceptions=True)

    async def finish(self, rollouts: Iterable[RolloutTask], absent: Callable[[RolloutTask], None]) -> None:
        """Check rollouts once, at the step's deadline."""
        self.cancel()
        asked = {each: each.entry.attempt for each in rollouts}
        limit_s, services = _DEADLINE_S, self._context.services
        if self._source is not None:
            # Containers are polled at the rate of invokes, as they are then stopped at that of stops.
            polls_s = len(asked) / services.dispatcher.calls.polls_per_s
            limit_s += min(polls_s, services.config.timeouts.publish_grace_s)
        try:
            async with asyncio.timeout(limit_s):
                await self.ask(asked, absent)
        except (StoreError, TimeoutError) as error:
            log.warning("step %d is out of time: %s", self._sink.step, error or "no answer in time")

    async def _ask_source(self, entry: LedgerEntry) -> bool:
        """Let the agent protocol's own source write what it has. Return whether it has answered."""
        if self._source is None or entry.session_id is None:
            return True
        return await self._source.find_result(entry.session_id, ended=entry.session_end is not None)

    async def ask(self, rollouts: dict[RolloutTask, int], absent: Callable[[RolloutTask], None]) -> None:
        """Ask once for each of these attempts, and take the results that are there. A rollout that was answered, or
        whose attempt was abandoned, is removed; `absent` is called as soon as it is known that there is no result.

        Raises:
            StoreError: those that are left were not answered.
        """
        listed: set[str] | None = None
        if len(rollouts) > _LISTED and self._source is None:  # a source writes results after the listing
            try:
                listed = await self._buffer.list_results(self._sink)
            except StoreError as error:
                log.warning("%s; the results are requested one by one", error)

        async def ask(rollout: RolloutTask) -> None:
            entry, attempt, rollout_id = rollout.entry, rollouts[rollout], rollout.rollout_id
            if entry.attempt == attempt and not await self._ask_source(entry):
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
