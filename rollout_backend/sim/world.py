"""The world of one history: S3, SQS, an agent runtime and its agents, with the real ones' semantics and faults.

- S3 is strongly consistent, and writes once where it is asked to. A call may fail before or after its work is done.
- SQS delivers at least once, in any order; what is not deleted becomes visible again, and after so many receives
  goes to the dead-letter queue.
- The runtime starts a session by its first invoke, and a fresh one if a stopped session's id is used again. It
  throttles, is full, conflicts, fails, and loses answers after the work was done.
- An agent outlives the trainer that started it. Its gateway does not: it is away until the trainer has been started
  again, and goes on with its journal, unless that is lost. Agents ask again for a while.

Everything that happens is written to `history`, which is the same for the same seed.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from agent_wrapper.contract import (
    REQUEST_FIELD,
    Announcement,
    Failure,
    Outcome,
    Rollout,
    RolloutRequest,
    Segment,
    Turn,
    VersionSpan,
)
from rollout_backend.collect.queue import Message
from rollout_backend.config import StorageConfig
from rollout_backend.dispatched import Dispatched
from rollout_backend.errors import (
    OutcomeUnknown,
    QuotaExceeded,
    Rejected,
    ResultMissing,
    RuntimeConflict,
    RuntimeUnavailable,
    StoreError,
    Throttled,
)
from rollout_backend.gateway import journal as journals
from rollout_backend.gateway.errors import ApiError
from rollout_backend.gateway.tokens import SessionClaims
from rollout_backend.sim.faults import Faults

EPOCH = 1_700_000_000.0
BUCKET = "rollouts"
MAX_RECEIVES = 5


class Killed(BaseException):
    """The trainer is dead: nothing that it calls does anything any more."""


@dataclass
class Trainer:
    """One life of the trainer's process, and of its gateway."""

    number: int
    alive: bool = True


@dataclass
class Journal:
    """What the gateway's folder holds: of each session the calls that were answered, and who is revoked."""

    epoch: str
    calls: dict[str, list[int]] = field(default_factory=dict)
    revoked: set[str] = field(default_factory=set)


@dataclass
class _Letter:
    id: str
    body: str
    sent_at: float
    visible_at: float
    receives: int = 0


@dataclass
class Session:
    id: str
    task: asyncio.Task[None]
    request: RolloutRequest
    stopping: bool = False
    accepted: bool = False  # and the trainer knows it
    noticed: bool = False  # it has said that this attempt is lost


class World:
    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        self.random = Random(seed)  # noqa: S311  # to be played again
        self.faults = Faults.draw(self.random) if faults is None else faults
        self.history: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.written_at: dict[str, float] = {}
        self.letters: list[_Letter] = []
        self.dead_letters: list[_Letter] = []
        self.queue_gone = False
        self.sessions: dict[str, Session] = {}
        self.trainer: Trainer | None = None
        self.journal = Journal("journal-0")
        self.keys: dict[str, SessionClaims] = {}  # by session
        self.notes: dict[int, list[str]] = {}  # of agents at work: the run's folder
        self.adopted: set[str] = set()  # sessions of earlier trainers that this one lets go on
        self.given_up: set[str] = set()  # sessions that are noted as closed
        self.wasted: list[str] = []  # rollouts that were begun again, or closed, while an agent was at work on them
        self.in_part: list[str] = []  # rollouts of whose calls the gateway has handed out the rest as the whole
        self.used_twice: list[str] = []  # ids of sessions that were started anew after their end
        self._used: set[str] = set()
        self.invoked: list[
            tuple[float, str]
        ] = []  # every invoke that started a session: when, of which rollout's key
        self.truth: dict[str, Rollout] = {}  # by key: what an agent really ended with
        self._poisoned: dict[str, bool] = {}
        self._numbers: defaultdict[str, int] = defaultdict(int)

    # --- time and chance ----------------------------------------------------------------------------------

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return EPOCH + self.now()

    def chance(self, name: str) -> bool:
        return self.random.random() < float(getattr(self.faults, name))

    def mended(self) -> None:
        """Somebody has read the diagnosis, and every task's container comes up from now on."""
        self._poisoned = dict.fromkeys(self._poisoned, False)

    def poisoned(self, task: str) -> bool:
        if task not in self._poisoned:
            self._poisoned[task] = self.chance("poison")
        return self._poisoned[task]

    async def passes(self, up_to: float) -> None:
        await asyncio.sleep(self.random.random() * up_to)

    def note(self, what: str) -> None:
        self.history.append(f"{self.now():9.3f} {what}")

    def starts(self, trainer: Trainer) -> None:
        if self.trainer is not None and self.chance("journal_lost"):
            self.note("the gateway's journal is lost")
            self.journal = Journal(f"journal-{trainer.number}")
        self.trainer = trainer
        self.adopted = set()

    def number(self, kind: str) -> int:
        self._numbers[kind] += 1
        return self._numbers[kind]

    # --- an agent, in its session -------------------------------------------------------------------------

    def open(self, request: RolloutRequest) -> None:
        others = [other for other in self.sessions.values() if other.request.key == request.key]
        self.wasted += [request.rollout_id for other in others if self.at_work(other)]
        if request.session_id in self._used:
            self.used_twice.append(request.session_id)
        self._used.add(request.session_id)
        self.invoked.append((self.now(), request.key))
        self.note(f"session starts: {request.rollout_id} attempt {request.attempt}")
        task = asyncio.create_task(self._live(request))
        session = Session(request.session_id, task, request)
        self.sessions[request.session_id] = session
        task.add_done_callback(lambda _: self._gone(session))

    def at_work(self, session: Session) -> bool:
        """Whether it may still come to something, and the trainer can know."""
        claims = self.keys[session.id]
        return (
            session.accepted
            and not session.noticed
            and session.id not in self.given_up
            and self.wall() < session.request.deadline
            and claims.epoch == self.journal.epoch
        )

    def _gone(self, session: Session) -> None:
        if self.sessions.get(session.id) is session and session.stopping:
            del self.sessions[session.id]

    async def _live(self, request: RolloutRequest) -> None:
        if self.chance("dies"):
            await self.passes(20)
            self.note(f"session dies: {request.rollout_id} attempt {request.attempt}")
            self.sessions.pop(request.session_id, None)
            return
        hangs = self.chance("hangs")
        try:
            rollout = await self._play(request)
            if hangs:
                await asyncio.Event().wait()
        except asyncio.CancelledError:  # the container is told to stop
            rollout = self._ended(request, Outcome.INFRA_ERROR, "terminated")
            await asyncio.sleep(0.2)
        await self._publish(request, rollout)
        # The process stays, as a container does, until it is stopped or idle for long.

    async def _play(self, request: RolloutRequest) -> Rollout:
        left, calls = request.deadline - self.wall(), _calls(request)
        try:
            async with asyncio.timeout(max(left, 0.0)):
                for call in calls:
                    await self.passes(8)
                    patience_s = 40 * self.random.random()
                    if self.chance("model_fails") or not await self._reaches_gateway(request, patience_s):
                        return self._ended(request, Outcome.INFRA_ERROR, "model_unavailable")
                    self.journal.calls.setdefault(request.session_id, []).append(call)
                if self.chance("agent_error"):
                    return self._ended(request, Outcome.AGENT_ERROR, "agent_exception")
                if not await self._reaches_gateway(request, left, to_seal=True):
                    return self._ended(request, Outcome.INFRA_ERROR, "trajectory_unavailable")
        except TimeoutError:
            return self._ended(request, Outcome.TIMED_OUT, "agent_deadline")
        return self._ended(request, Outcome.COMPLETED, calls=self.journal.calls[request.session_id])

    async def _reaches_gateway(self, request: RolloutRequest, patience_s: float, to_seal: bool = False) -> bool:
        until, claims = self.now() + patience_s, self.keys[request.session_id]
        while (
            self.trainer is None
            or not self.trainer.alive
            or not (to_seal or claims.life == str(self.trainer.number) or claims.session_id in self.adopted)
        ):
            if self.now() >= until:
                return False
            await asyncio.sleep(1.0)
        try:
            journals.refuse_lost(claims, self.journal.epoch)
        except ApiError:
            return False
        return request.session_id not in self.journal.revoked

    def _ended(
        self, request: RolloutRequest, outcome: Outcome, reason: str = "", calls: Sequence[int] = ()
    ) -> Rollout:
        completed = outcome is Outcome.COMPLETED
        # Deterministic agents: what one samples follows from what it is, whichever attempt it is.
        own = Random(request.rollout_id)  # noqa: S311
        return Rollout(
            run_id=request.run_id,
            step=request.step,
            task_id=request.task_id,
            rollout_id=request.rollout_id,
            attempt=request.attempt,
            session_id=request.session_id,
            outcome=outcome,
            reward=float(own.random() < 0.5) if completed else None,
            failure=None if completed else Failure(reason=reason, message="as the world would have it"),
            segments=_segments(request, calls) if completed else (),
            started_at=self.wall(),
            finished_at=self.wall(),
        )

    async def _publish(self, request: RolloutRequest, rollout: Rollout) -> None:
        key = request.key_for(rollout.outcome)
        body = rollout.encode()
        if rollout.outcome is Outcome.COMPLETED:  # what it really did, whatever the gateway has handed out
            whole = rollout.model_copy(update={"segments": _segments(request, _calls(request))})
            if whole.encode() != body:
                self.in_part.append(request.rollout_id)
            rollout = whole
        if self.chance("malformed"):
            body = body[: len(body) // 2]
        for _ in range(4):
            await self.passes(0.3)
            if self.chance("put_fails"):
                continue
            if request.session_id in self.sessions and rollout.outcome is Outcome.INFRA_ERROR:
                self.sessions[request.session_id].noticed = True
            if key not in self.objects:  # If-None-Match
                self.objects[key] = body
                self.written_at[key] = self.now()
                self.truth[key] = rollout
                self.note(f"written: {key.rpartition('/')[2]} {rollout.outcome}")
            if not self.chance("put_cut"):
                break
        if key not in self.objects:
            self.note(f"lost: the result of {request.rollout_id} could not be written")
            return
        if request.result.queue_url is None:
            return
        message = Announcement(bucket=BUCKET, key=key).encode()
        await self.passes(0.2)
        if not self.chance("announce_lost"):
            self.send(message)
        if self.chance("announce_twice"):
            await self.passes(30)
            self.send(message)
        if self.chance("junk"):
            junk = [
                "{",
                Announcement(bucket="somebody-elses", key=key).encode(),
                Announcement(bucket=BUCKET, key=key + ".never").encode(),
                Announcement(bucket=BUCKET, key=key.replace("/steps/0", "/steps/9")).encode(),
                Announcement(bucket=BUCKET, key=key.partition("~")[0] + "~77").encode(),
            ]
            self.send(self.random.choice(junk))

    def send(self, body: str) -> None:
        if not self.queue_gone:
            delay = self.random.random() * (5.0 if self.random.random() < 0.2 else 0.1)
            self.letters.append(_Letter(f"m{self.number('letter')}", body, self.wall(), self.now() + delay))


def _calls(request: RolloutRequest) -> range:
    """The model calls that its agent makes."""
    return range(Random(request.rollout_id).randint(1, 6))  # noqa: S311


def _segments(request: RolloutRequest, calls: Sequence[int]) -> tuple[Segment, ...]:
    """One conversation, of whose calls each has a token given and three sampled."""
    ids = [Random(f"{request.rollout_id} {call}").randrange(1000) for call in calls for _ in range(4)]  # noqa: S311
    spans = [VersionSpan(version="0", start=at, end=at + 3) for at in range(1, len(ids), 4)]
    turns = [Turn(start=s.start, end=s.end, finish_reason="stop", weight_versions=(s,)) for s in spans]
    segment = Segment.parse(
        {
            "token_ids": ids,
            "mask": [0, 1, 1, 1] * len(calls),
            "logprobs": [None, -0.5, -0.25, -0.125] * len(calls),
            "turns": [turn.model_dump() for turn in turns],
        }
    )
    return (segment,)


class SimStore:
    """What `ResultStore` is to a trainer."""

    def __init__(self, world: World, trainer: Trainer) -> None:
        self.config = StorageConfig(bucket=BUCKET)
        self._world = world
        self._trainer = trainer

    async def _call(self) -> None:
        for _ in range(3):  # as the SDK does
            await self._world.passes(0.1)
            if not self._trainer.alive:
                raise Killed
            if not self._world.chance("s3"):
                return
        raise StoreError("S3 does not answer")

    async def get(self, key: str) -> bytes:
        await self._call()
        if key not in self._world.objects:
            raise ResultMissing(f"nothing is stored under {key!r}")
        return self._world.objects[key]

    async def put(self, key: str, body: bytes) -> None:
        await self._call()
        self._world.objects[key] = body

    async def keys(self, prefix: str) -> AsyncIterator[str]:
        await self._call()
        for key in sorted(key for key in self._world.objects if key.startswith(prefix)):
            yield key

    async def quarantine(self, run_id: str, what: str, reason: str, evidence: bytes) -> str:
        key = f"runs/{run_id}/quarantine/{self._world.number('quarantine')}"
        await self._call()
        self._world.objects[key] = json.dumps([what, reason]).encode()
        return key


class SimQueue:
    """What `AnnouncementQueue` is to a trainer."""

    url = "https://sqs/queue"

    def __init__(self, world: World, trainer: Trainer, wait_s: float = 20.0, visibility_s: float = 60.0) -> None:
        self._world = world
        self._trainer = trainer
        self._wait_s = wait_s
        self._visibility_s = visibility_s
        self.on_delete: Any = lambda message: None

    async def receive(self) -> list[Message]:
        world = self._world
        until = world.now() + self._wait_s
        while True:
            await asyncio.sleep(0.05)
            self._check()
            now = world.now()
            visible = [letter for letter in world.letters if letter.visible_at <= now]
            if visible:
                break
            if now >= until:
                return []
            later = [letter.visible_at for letter in world.letters]
            await asyncio.sleep(max(0.05, min([until, now + 1.0, *later]) - now))
        taken = world.random.sample(visible, min(len(visible), world.random.randint(1, 10)))
        found = []
        for letter in taken:
            letter.receives += 1
            if letter.receives > MAX_RECEIVES:
                world.letters.remove(letter)
                world.dead_letters.append(letter)
                continue
            letter.visible_at = now + self._visibility_s
            found.append(Message(letter.body, letter.id, letter.id, letter.sent_at))
        return found

    async def delete(self, messages: Sequence[Message]) -> None:
        await self._world.passes(0.05)
        self._check()
        for message in messages:
            self.on_delete(message)
        gone = {message.receipt for message in messages}
        self._world.letters = [letter for letter in self._world.letters if letter.id not in gone]

    def _check(self) -> None:
        if not self._trainer.alive:
            raise Killed
        if self._world.queue_gone or self._world.chance("sqs"):
            raise OSError("SQS does not answer")


class SimRuntime:
    """What an `AgentRuntime` is to a trainer."""

    def __init__(self, world: World, trainer: Trainer, max_sessions: int = 256) -> None:
        self._world = world
        self._trainer = trainer
        self._max_sessions = max_sessions

    async def check(self) -> None: ...

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        world = self._world
        await world.passes(0.5)
        if not self._trainer.alive:
            raise Killed
        told = json.loads(payload)
        request = RolloutRequest.parse(told[REQUEST_FIELD])
        if world.chance("throttled"):
            raise Throttled("slow down")
        if world.chance("quota") or len(world.sessions) >= self._max_sessions:
            raise QuotaExceeded("too many sessions")
        if world.chance("conflict"):
            raise RuntimeConflict("somebody else is at it")
        if world.chance("unavailable"):
            raise RuntimeUnavailable("503")
        if world.chance("container") or world.poisoned(told["q"]):
            raise Rejected("424", reason="container_error")
        if session_id not in world.sessions:
            world.open(request)
        await world.passes(1.0)
        if not self._trainer.alive:
            raise Killed
        if world.chance("cut_after"):
            raise OutcomeUnknown("the answer was lost")
        if session_id in world.sessions:
            world.sessions[session_id].accepted = True
        return b'{"status": "accepted"}'

    async def stop(self, session_id: str) -> None:
        world = self._world
        await world.passes(0.3)
        if not self._trainer.alive:
            raise Killed
        if world.chance("stop_refused"):
            raise world.random.choice([Throttled("slow down"), RuntimeConflict("busy"), OutcomeUnknown("cut")])
        session = world.sessions.pop(session_id, None)
        if session is not None:
            session.stopping = True
            session.task.cancel()

    async def aclose(self) -> None: ...


class SimDispatched(Dispatched):
    """The notes themselves, in a folder of the world."""

    def __init__(self, world: World, trainer: Trainer) -> None:
        super().__init__(Path("notes"))
        self._world = world
        self._trainer = trainer
        self.wants: Callable[[str], bool] = lambda rollout_id: False  # whether a rollout is not settled

    def closed(self, step: int, session_id: str) -> None:
        super().closed(step, session_id)
        session = self._world.sessions.get(session_id)
        if session is not None and self._world.at_work(session) and self.wants(session.request.rollout_id):
            self._world.wasted.append(session.request.rollout_id)
        self._world.given_up.add(session_id)

    def _append(self, step: int, text: str) -> None:
        if not self._trainer.alive:
            raise Killed
        self._world.notes.setdefault(step, []).append(text)

    def _lines(self, step: int) -> list[str]:
        return [line.strip() for line in self._world.notes.get(step, [])]

    def _forget(self, step: int) -> None:
        if not self._trainer.alive:
            raise Killed
        self._world.notes.pop(step, None)
