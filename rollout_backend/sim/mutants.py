"""Deliberately broken variants of the production code, each with one promise taken out.

They show that the simulator's checks have no holes: every one of them must be caught by some seed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

from agent_wrapper.contract import ContractError, Outcome, Rollout
from rollout_backend import step as step_module
from rollout_backend.breaker import Breaker
from rollout_backend.collect.buffer import RolloutBuffer
from rollout_backend.collect.manifests import ManifestStore
from rollout_backend.collect.queue import Message
from rollout_backend.collect.set_aside import SetAside
from rollout_backend.dispatch.closer import SessionCloser
from rollout_backend.dispatch.dispatcher import Dispatcher
from rollout_backend.gateway import journal
from rollout_backend.ledger import Arrival, Ledger
from rollout_backend.manifest import Manifest
from rollout_backend.policy import StragglerRule
from rollout_backend.report import GroupResult
from rollout_backend.step import Step
from rollout_backend.take_up import adoptable

Patch = contextlib.AbstractContextManager[Any]
MUTANTS: dict[str, Callable[[], Patch]] = {}


def _mutant(make: Callable[[], Patch]) -> Callable[[], Patch]:
    MUTANTS[make.__name__] = make
    return make


@_mutant
def delete_before_store() -> Patch:
    """A message is deleted as soon as it is received."""
    handle = RolloutBuffer._handle

    async def broken(self: RolloutBuffer, queue: Any, messages: list[Message]) -> None:
        with contextlib.suppress(OSError):
            await queue.delete(messages)
        await handle(self, queue, messages)

    return patch.object(RolloutBuffer, "_handle", broken)


@_mutant
def dedupe_by_message_id() -> Patch:
    """What was seen is told by the message, so a result announced twice counts twice."""

    def broken(
        self: Ledger, rollout_id: str, outcome: Outcome, reason: str = "", message: str = "", **more: Any
    ) -> Arrival:
        entry = self.entries[rollout_id]
        self._settle(entry, outcome, reason, message)
        entry.by_result, entry.trainable = True, bool(more.get("trainable"))
        return Arrival.FIRST

    group_result = Step._group_result

    def result(self: Step, group: Any) -> GroupResult:
        made = group_result(self, group)
        times = self.seen  # type: ignore[attr-defined]
        twice = [rollout for rollout in made.rollouts for _ in range(1 + times[rollout.rollout_id])]
        return replace(made, rollouts=tuple(twice))

    def again(self: Step, rollout_id: str) -> None:
        if rollout_id in self._rollouts:
            self.seen[rollout_id] = self.seen.get(rollout_id, 0) + 1  # type: ignore[attr-defined]

    begin = Step._begin

    async def begun(self: Step) -> None:
        self.seen = _Zeros()  # type: ignore[attr-defined]
        await begin(self)

    return _all(
        patch.object(Ledger, "arrive", broken),
        patch.object(Step, "_group_result", result),
        patch.object(Step, "again", again),
        patch.object(Step, "_begin", begun),
    )


class _Zeros(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0


@_mutant
def no_sweep() -> Patch:
    """What was not announced is never looked for."""

    async def nothing(self: Step, *_: Any) -> None: ...

    async def for_ever(self: Step) -> None:
        await asyncio.Event().wait()

    return _all(patch.object(Step, "_sweep_when_quiet", for_ever), patch.object(Step, "_last_look", nothing))


@_mutant
def reward_zero_on_failure() -> Patch:
    """A rollout that was lost is trained as one that earned nothing."""
    result = Step._group_result

    def broken(self: Step, group: Any) -> GroupResult:
        made = result(self, group)
        lost = [_worthless(self, rid) for rid in group.ids if self.ledger.entries[rid].outcome is Outcome.INFRA_ERROR]
        return replace(made, rollouts=(*made.rollouts, *lost))

    return patch.object(Step, "_group_result", broken)


def _worthless(step: Step, rollout_id: str) -> Rollout:
    return _made_up(step=step.step, rollout_id=rollout_id, reward=0.0)


def _made_up(**fields: Any) -> Rollout:
    made: Any = Rollout.model_construct
    return cast(Rollout, made(run_id="simulated", task_id="t", outcome=Outcome.COMPLETED, **fields))


@_mutant
def no_manifest() -> Patch:
    """A trainer that starts again knows of nothing that was there before."""

    async def nothing(self: ManifestStore, step: int) -> Manifest | None:
        return None

    return patch.object(ManifestStore, "read", nothing)


@_mutant
def finished_not_taken_up() -> Patch:
    """A step that is begun again closes what was open, and runs all of it anew."""

    async def nothing(self: RolloutBuffer, sink: Any) -> bool:
        return True

    return patch.object(RolloutBuffer, "sweep", nothing)


@_mutant
def sessions_of_finished_rollouts_left_open() -> Patch:
    """Only what is not finished has its sessions of earlier takes closed."""
    take_up = Step._close_earlier

    async def broken(self: Step, session_ids: Sequence[str]) -> None:
        finished = {
            self._manifest.session_id(rollout_id, attempt)
            for rollout_id in self._rollouts
            for attempt in range(self._manifest.attempts_before + 1)
        }
        await take_up(self, [session_id for session_id in session_ids if session_id not in finished])

    return patch.object(Step, "_close_earlier", broken)


@_mutant
def session_ids_used_again() -> Patch:
    """Every attempt of a rollout goes to one session id."""

    def broken(self: Manifest, rollout_id: str, attempt: int) -> str:
        return f"session-of-{rollout_id}-{self.nonce}"

    return patch.object(Manifest, "session_id", broken)


@_mutant
def failed_attempts_left_open() -> Patch:
    """A session whose invoke got no answer is taken for one that never began."""

    async def broken(
        self: Dispatcher, rollout_id: str, ledger: Ledger, prepare: Callable[[int], Any], close: Any
    ) -> bool:
        async def forget(session_id: str) -> None:
            ledger.session_closed(session_id)

        return await attempt(self, rollout_id, ledger, prepare, forget)

    attempt = Dispatcher._attempt
    return patch.object(Dispatcher, "_attempt", broken)


@_mutant
def stops_not_repeated() -> Patch:
    """A stop that was refused once is taken for done."""

    async def broken(self: SessionCloser, session_id: str, ledger: Ledger) -> None:
        with contextlib.suppress(Exception):
            await self._stop(session_id)
        ledger.session_closed(session_id)

    return patch.object(SessionCloser, "close", broken)


@_mutant
def results_unchecked() -> Patch:
    """Whatever stands under a rollout's key is taken for its result."""
    decode = Rollout.decode.__func__  # type: ignore[attr-defined]

    def broken(cls: type[Rollout], data: bytes, max_bytes: int = 0) -> Rollout:
        try:
            found: Rollout = decode(cls, data)
        except ContractError:
            return _made_up(step=0, rollout_id="?", reward=1.0)
        return found

    return _all(
        patch.object(Rollout, "decode", classmethod(broken)),
        patch.object(RolloutBuffer, "_check", lambda self, *_: None),
    )


@_mutant
def malformed_results_fetched_for_ever() -> Patch:
    """What cannot be understood is neither refused nor settled, and each listing brings it up again."""

    async def broken(self: RolloutBuffer, *_: Any) -> bool:
        return False

    return patch.object(RolloutBuffer, "_reject", broken)


@_mutant
def late_results_taken() -> Patch:
    """A rollout that was given up still counts when its result comes."""
    wants = Ledger.wants

    def broken(self: Ledger, rollout_id: str) -> bool:
        entry = self.entries.get(rollout_id)
        return wants(self, rollout_id) or (entry is not None and not entry.by_result)

    return patch.object(Ledger, "wants", broken)


@_mutant
def breaker_never_opens() -> Patch:
    """However many rollouts are lost in one way, the run goes on."""
    return patch.object(Breaker, "judge", lambda *_: None)


@_mutant
def stopped_steps_leave_their_sessions() -> Patch:
    """A step that is ended by the breaker forgets what still runs."""
    abort = Step.abort

    def broken(self: Step, error: BaseException) -> None:
        for life in self._lives.values():
            life.cancel()
        self.ledger.open_sessions.clear()
        abort(self, error)

    return patch.object(Step, "abort", broken)


@_mutant
def stragglers_are_not_looked_for() -> Patch:
    """What takes too long is cut off though its result may be there."""

    async def broken(self: Step, rollout_ids: list[str]) -> None:
        for rollout_id in rollout_ids:
            self._end(self.ledger.entries[rollout_id], Outcome.TIMED_OUT, "straggler")

    return patch.object(Step, "_cut_off", broken)


@_mutant
def stragglers_are_whoever_is_left() -> Patch:
    """Once enough are finished the others get no time of their own."""
    allowed = StragglerRule.allowed_s

    def broken(self: StragglerRule, took: Sequence[float], still_open: int) -> float | None:
        return None if allowed(self, took, still_open) is None else 0.0

    return patch.object(StragglerRule, "allowed_s", broken)


@_mutant
def losses_forgotten() -> Patch:
    """What was set aside is dispatched again."""
    return patch.object(SetAside, "why", lambda *_: None)


@_mutant
def lost_journals_pass_for_whole() -> Patch:
    """Agents go on though the journal is lost, and what they sample from then on is handed out as all there is."""

    def broken(before: Manifest | None, now: Manifest, notes: Any, wall: float) -> Any:
        return adoptable(before and before.model_copy(update={"gateway": now.gateway}), now, notes, wall)

    return _all(
        patch.object(journal, "refuse_lost", lambda *_: None),
        patch.object(step_module, "adoptable", broken),
    )


@_mutant
def agents_at_work_run_again() -> Patch:
    """What still runs when a trainer starts again is closed, and begun anew."""
    return patch.object(step_module, "adoptable", lambda *_: {})


@_mutant
def adopted_and_dispatched() -> Patch:
    """What goes on is run a second time as well."""
    live = Step._live

    async def broken(self: Step, rollout_id: str, task: Any) -> None:
        adopted = self.adopted.pop(rollout_id, None)
        await live(self, rollout_id, task)
        if adopted is not None:
            await self._close(adopted.note.session_id)

    return patch.object(Step, "_live", broken)


@_mutant
def adopted_sessions_left_open() -> Patch:
    """What goes on is not closed when it is done."""
    close = Step._close

    async def broken(self: Step, session_id: str) -> None:
        if any(session_id == each.note.session_id for each in self.adopted.values()):
            self.ledger.session_closed(session_id)
        else:
            await close(self, session_id)

    return patch.object(Step, "_close", broken)


@contextlib.contextmanager
def _all(*patches: Patch) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


def mutated(name: str) -> Patch:
    """A context in which the production code is broken in this one way."""
    return MUTANTS[name]()
