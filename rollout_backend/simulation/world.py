"""The simulated world of one history: S3, SQS, an agent runtime and its agents, with real semantics and faults.

- S3 is strongly consistent and supports conditional writes. A call may fail before or after it has its effect.
- SQS delivers at least once, in any order. A message that is not deleted becomes visible again, and moves to the
  dead-letter queue after `queue.max_receives` receives.
- The runtime starts a session with its first invoke, and a new one if a stopped session's id is used again. It
  throttles, has quotas and conflicts, fails, and loses responses after a call has had its effect.
- An agent outlives the trainer that started it. Its gateway does not: it is down until the trainer restarts, and then
  continues with its journal unless that is lost. Agents retry for a while.

Every event is written to `history`, which is deterministic for a seed.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import math
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
    manifest_key,
    quarantine_prefix,
)
from rollout_backend.collect.queue import Message
from rollout_backend.collect.store import StoredObject
from rollout_backend.config import StorageConfig
from rollout_backend.core.api_error import ApiError
from rollout_backend.core.heartbeats import HeartbeatReport
from rollout_backend.core.manifest import Manifest
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.dispatch.token_bucket import TokenBucket
from rollout_backend.errors import (
    OutcomeUnknown,
    QuotaExceeded,
    Rejected,
    ResultMissing,
    RuntimeConflict,
    RuntimeUnavailable,
    StoreError,
    Throttled,
    WriteConflict,
)
from rollout_backend.gateway import journal as journals
from rollout_backend.observe.archive import RunArchive
from rollout_backend.run_lease import LeaseHolder, LeaseRecord
from rollout_backend.simulation.capacity import Outage, Refusal
from rollout_backend.simulation.faults import Faults
from rollout_backend.step.in_flight import InFlightLog

EPOCH = 1_700_000_000.0
BUCKET = "rollouts"
MAX_RECEIVES = 5
HEARTBEAT_S = 5.0
LEASE_S = 60.0
_REVOKED_WITHIN_S = 2.0


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


@dataclass
class Journal:
    """The gateway's journal: the answered calls of each session, and the revoked sessions."""

    journal_id: str
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
    accepted: bool = False  # and the trainer has received the response
    noticed: bool = False  # it has written its failure marker
    beats_at: float = 0.0  # when its next heartbeat is due
    heard_by: int | None = None  # the number of the trainer that received a heartbeat


class World:
    def __init__(self, seed: int, faults: Faults | None = None, planned: int | None = None) -> None:
        self.random = Random(seed)  # noqa: S311  # deterministic
        severity = 1.0 if planned is None else 0.2
        self.faults = Faults.draw(self.random, severity) if faults is None else faults
        self.history: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.written_at: dict[str, float] = {}
        self.letters: list[_Letter] = []
        self.dead_letters: list[_Letter] = []
        self.queue_gone = False
        self.absent_at: dict[str, float] = {}  # by key: when S3 last answered a GET with 404
        self.listed_at: dict[str, float] = {}  # by prefix: when S3 last listed it
        self.list_tried: dict[str, float] = {}  # by prefix: when a listing was last requested
        self.s3_outages: dict[str, tuple[float, float]] = {}  # by kind of call: start and end
        for kind in ("PUT", "GET", "LIST"):
            if self.chance("s3_outage"):
                since = self.random.random() * 60
                self.s3_outages[kind] = since, since + self.random.random() * 120
        self.outage = Outage.draw(self.random) if self.chance("outage") else None
        per_s = self.random.choice([1.0, 3.0]) * (1 if planned is None else planned / 32)
        self.quota = TokenBucket(per_s) if self.chance("hidden_quota") else None
        self.cut_off = (0.0, 0.0)  # start and end of the time in which no heartbeat arrives
        if self.chance("cut_off"):
            since = self.random.random() * 60
            self.cut_off = since, since + self.random.random() * 100
        self.died: dict[str, float] = {}  # sessions that ended silently, and when
        self.sessions: dict[str, Session] = {}
        self.trainer: Trainer | None = None
        self.started_at = 0.0
        self.trainers: dict[int, Trainer] = {}
        self.journal = Journal("journal-0")
        self.keys: dict[str, SessionClaims] = {}  # by session
        self.notes: dict[int, list[str]] = {}  # the in-flight log in the run directory, by step
        self.adopted: set[str] = set()  # sessions of earlier trainers that this one keeps running
        self.given_up: dict[str, float] = {}  # sessions that are logged as closed, and when
        self.sampled_on: list[str] = []  # rollouts whose agents sampled after their session was closed
        self.wasted: list[str] = []  # rollouts that were started again, or closed, while their agent was running
        self.in_part: list[str] = []  # rollouts of which the gateway returned the last calls as the whole trajectory
        self.unrecorded: list[str] = []  # rollouts that were started without being in the manifest in S3
        self.put_at: dict[str, float] = {}  # by key: when a trainer wrote it
        self.holder: str | None = None  # the run's holder according to S3
        self.held_since = 0.0
        self.fenced_off: list[str] = []  # actions of managers that had lost the run
        self.read_twice: list[str] = []  # results that one trainer fetched twice at the same time
        self.used_twice: list[str] = []  # ids of sessions that were started again after a stop
        self.stopped: set[str] = set()  # ids of sessions that were sent a stop
        self.asked_for: set[str] = set()  # ids of sessions that an invoke named, even if it failed
        self.notes_lost = False
        self.stopped_in_vain: list[str] = []  # ids that were stopped but never invoked, although no log was lost
        self.invoked: list[
            tuple[float, str]
        ] = []  # each invoke that started a session: its time and its rollout's key
        self.truth: dict[str, Rollout] = {}  # by key: the agent's real result
        self._poisoned: dict[str, bool] = {}
        self._numbers: defaultdict[str, int] = defaultdict(int)

    # --- time and chance ----------------------------------------------------------------------------------

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return EPOCH + self.now()

    def chance(self, name: str) -> bool:
        return self.random.random() < float(getattr(self.faults, name))

    def repair_tasks(self) -> None:
        """Let every task's container start from now on, as if a user had fixed the cause of the circuit breaker."""
        self._poisoned = dict.fromkeys(self._poisoned, False)

    def poisoned(self, task: str) -> bool:
        if task not in self._poisoned:
            self._poisoned[task] = self.chance("poison")
        return self._poisoned[task]

    async def passes(self, up_to: float) -> None:
        await asyncio.sleep(self.random.random() * up_to)

    def note(self, what: str) -> None:
        self.history.append(f"{self.now():9.3f} {what}")

    def holder_of(self, trainer: Trainer) -> LeaseHolder:
        number, where = trainer.number, trainer.machine
        return LeaseHolder(id=f"trainer-{number}", host=where, machine=where, pid=number, since=self.wall())

    def starts(self, trainer: Trainer) -> None:
        """Start the trainer's gateway."""
        if self.trainer is not None and self.chance("journal_lost"):
            self.note("the gateway's journal is lost")
            self.journal = Journal(f"journal-{trainer.number}")
            if self.random.random() < 0.5:  # the whole run directory, as on another machine
                self.notes.clear()
                self.notes_lost = True
        self.notes_lost = self.notes_lost or self._unnoted()
        self.trainer = trainer
        self.started_at = self.now()
        self.adopted = set()

    def _unnoted(self) -> bool:
        """Return whether a manifest names attempts that its trainer could not log before it was killed."""
        for key, body in self.objects.items():
            if "/manifests/" in key:
                manifest = Manifest.parse(json.loads(body))
                lines = (json.loads(line).get("execution") for line in self.notes.get(manifest.step, []))
                last = max((each["last"] for each in lines if each), default=0)
                if max(last, manifest.attempts_closed) < manifest.attempts_before + manifest.attempts:
                    return True
        return False

    def stored(self, key: str, body: bytes) -> None:
        """Check an object that a trainer has written."""
        before = self.objects.get(key)
        if "/manifests/" in key and before is not None and _fencing_token(before) > _fencing_token(body):
            self.fenced_off.append(f"fencing token {_fencing_token(body)} wrote {key} after {_fencing_token(before)}")
        if key.endswith("/lease") and before is not None:
            self._check_taken(LeaseRecord.model_validate_json(before), LeaseRecord.model_validate_json(body), key)
        self.objects[key], self.put_at[key] = body, self.now()
        if key.endswith("/lease") and (holder := json.loads(body)["manager_id"]) != self.holder:
            self.holder, self.held_since = holder, self.now()
            self.note(f"{holder} holds the run")

    def _check_taken(self, before: LeaseRecord, now: LeaseRecord, key: str) -> None:
        """Check that no manager takes over the run from one that renews its lease."""
        other, taker = before.starting or before.holder, now.starting
        if taker is None or other is None or other.id == taker.id or before.released:
            return
        if self.trainers[other.pid].alive and self.now() - self.put_at[key] < LEASE_S:
            self.fenced_off.append(f"{taker.id} took the run from {other.id}, which renewed its lease")

    def number(self, kind: str) -> int:
        self._numbers[kind] += 1
        return self._numbers[kind]

    # --- an agent, in its session -------------------------------------------------------------------------

    def open(self, request: RolloutRequest) -> None:
        others = [other for other in self.sessions.values() if other.request.key == request.key]
        self.wasted += [request.rollout_id for other in others if self.at_work(other)]
        if f'"{request.rollout_id}"' not in self.objects[manifest_key("", request.run_id, request.step)].decode():
            self.unrecorded.append(request.rollout_id)
        by = f"trainer-{self.keys[request.session_id].trainer_incarnation}"
        if self.holder != by and self.now() > self.held_since + 5:
            self.fenced_off.append(f"{by} started {request.rollout_id} while {self.holder} held the run")
        if request.session_id in self.stopped:
            self.used_twice.append(request.session_id)
        self.invoked.append((self.now(), request.key))
        self.note(f"session starts: {request.rollout_id} attempt {request.attempt}")
        task = asyncio.create_task(self._live(request))
        session = Session(request.session_id, task, request)
        self.sessions[request.session_id] = session
        task.add_done_callback(lambda _: self._gone(session))

    def at_work(self, session: Session) -> bool:
        """Return whether its rollout can still complete, and the trainer can know it."""
        claims = self.keys[session.id]
        return (
            session.accepted
            and not session.noticed
            and not session.task.done()
            and session.id not in self.given_up
            and self.wall() < session.request.deadline
            and claims.journal_id == self.journal.journal_id
        )

    def heard(self, trainer: Trainer) -> HeartbeatReport:
        """Return the sessions whose heartbeats arrived since the last call. Wrappers send them until they publish."""
        beats = set()
        for session in self.sessions.values():
            started_by = self.trainers[int(self.keys[session.id].trainer_incarnation)]
            if started_by.machine != trainer.machine:  # heartbeats go to the gateway that started the session
                continue
            if self.now() < session.beats_at or session.task.done():
                continue
            arrives = not self.cut_off[0] <= self.now() < self.cut_off[1] and not self.chance("beat_lost")
            session.beats_at = self.now() + (HEARTBEAT_S if arrives else HEARTBEAT_S / 3)
            if arrives:
                session.heard_by = trainer.number
                beats.add(session.id)
        return HeartbeatReport(frozenset(beats))

    def _gone(self, session: Session) -> None:
        if self.sessions.get(session.id) is session and session.stopping:
            del self.sessions[session.id]

    async def _live(self, request: RolloutRequest) -> None:
        if self.chance("dies"):
            await self.passes(20)
            self.note(f"session dies: {request.rollout_id} attempt {request.attempt}")
            session = self.sessions.pop(request.session_id, None)
            if session is not None and session.heard_by is not None:
                self.died[request.session_id] = self.now()
            return
        hangs = self.chance("hangs")
        try:
            rollout = await self._play(request)
            if hangs:
                await asyncio.Event().wait()
        except asyncio.CancelledError:  # the container is stopped
            rollout = self._ended(request, Outcome.INFRA_ERROR, "terminated")
            await asyncio.sleep(0.2)
        await self._publish(request, rollout)
        # Like a container, the process stays until it is stopped or idle for long.

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
                    if self.now() > self.given_up.get(request.session_id, math.inf) + _REVOKED_WITHIN_S:
                        self.sampled_on.append(request.rollout_id)
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
            or not (
                to_seal or claims.trainer_incarnation == str(self.trainer.number) or claims.session_id in self.adopted
            )
        ):
            if self.now() >= until:
                return False
            await asyncio.sleep(1.0)
        try:
            journals.check_journal(claims, self.journal.journal_id)
        except ApiError:
            return False
        return request.session_id not in self.journal.revoked

    def _ended(
        self, request: RolloutRequest, outcome: Outcome, reason: str = "", calls: Sequence[int] = ()
    ) -> Rollout:
        completed = outcome is Outcome.COMPLETED
        # Agents are deterministic: the samples follow from the rollout id, and are the same in each attempt.
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

    def _forge(self, hostile: RolloutRequest) -> None:
        """Write an object for another rollout of the step, which a container can do with the agent's role."""
        others = [
            s.request for s in self.sessions.values() if s.request.key.startswith(hostile.key.rpartition("/")[0])
        ]
        others = [request for request in others if request.rollout_id != hostile.rollout_id]
        if not others:
            return
        victim = self.random.choice(others)
        outcome = self.random.choice([Outcome.COMPLETED, Outcome.TIMED_OUT, Outcome.INFRA_ERROR, Outcome.INFRA_ERROR])
        session_id = self.random.choice([hostile.session_id, "rollout-made-up", ""])
        rollout = self._ended(victim, outcome, "forged", calls=_calls(victim))
        key = victim.key_for(outcome)
        if key not in self.objects:  # If-None-Match
            self.objects[key] = rollout.model_copy(update={"session_id": session_id}).encode()
            self.note(f"forged: {key.rpartition('/')[2]} {outcome}")
        if victim.result.queue_url is not None:
            self.send(Announcement(bucket=BUCKET, key=key).encode())

    async def _publish(self, request: RolloutRequest, rollout: Rollout) -> None:
        key = request.key_for(rollout.outcome)
        if self.chance("forged"):
            self._forge(request)
        body = rollout.encode()
        if rollout.outcome is Outcome.COMPLETED:  # all calls, not only those that the gateway returned
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


def _fencing_token(manifest: bytes) -> int:
    return int(json.loads(manifest)["fencing_token"])


def _calls(request: RolloutRequest) -> range:
    """Return the model calls of the rollout's agent."""
    return range(Random(request.rollout_id).randint(1, 6))  # noqa: S311


def _segments(request: RolloutRequest, calls: Sequence[int]) -> tuple[Segment, ...]:
    """Return one conversation: each call has one given and three sampled tokens."""
    ids = [Random(f"{request.rollout_id} {call}").randrange(1000) for call in calls for _ in range(4)]  # noqa: S311
    spans = [VersionSpan(version="0", start=at, end=at + 3) for at in range(1, len(ids), 4)]
    turns = [Turn(start=s.start, end=s.end, finish_reason="stop", weight_versions=(s,)) for s in spans]
    segment = Segment.parse(
        {
            "token_ids": ids,
            "response_mask": [0, 1, 1, 1] * len(calls),
            "logprobs": [None, -0.5, -0.25, -0.125] * len(calls),
            "turns": [turn.model_dump() for turn in turns],
        }
    )
    return (segment,)


class SimStore:
    """Replaces `ResultStore`."""

    def __init__(self, world: World, trainer: Trainer) -> None:
        self.config = StorageConfig(bucket=BUCKET)
        self.reading: set[str] = set()
        self._world = world
        self._trainer = trainer

    async def _call(self, kind: str) -> None:
        if self._world.now() < self._trainer.cut_off_until:
            await self._world.passes(5)
            raise StoreError("S3 is not reached")
        since, until = self._world.s3_outages.get(kind, (0.0, 0.0))
        for _ in range(3):  # as the SDK does
            await self._world.passes(0.1)
            if not self._trainer.alive:
                raise Killed
            if not self._world.chance("s3") and not since <= self._world.now() < until:
                return
        raise StoreError(f"S3 refused a {kind}: 503 SlowDown")

    async def get(self, key: str) -> bytes:
        return (await self.fetch(key)).body

    async def fetch(self, key: str) -> StoredObject:
        await self._call("GET")
        if "/steps/" in key:
            await self._reads_slowly(key)
        if "/steps/" in key and self._world.chance("surprise"):
            raise ZeroDivisionError("a defect over this object")
        if key not in self._world.objects:
            self._world.absent_at[key] = self._world.now()
            raise ResultMissing(f"nothing is stored under {key!r}")
        body = self._world.objects[key]
        return StoredObject(body, _etag(body), self._world.now() - self._world.put_at.get(key, 0.0))

    async def _reads_slowly(self, key: str) -> None:
        if key in self.reading:
            self._world.read_twice.append(key)
        self.reading.add(key)
        try:
            await self._world.passes(15 * self._world.faults.slow_gets)
        finally:
            self.reading.discard(key)

    async def put(self, key: str, body: bytes) -> None:
        await self._put(key, body, lambda: None)

    async def put_if_match(self, key: str, body: bytes, etag: str | None) -> str:
        def check() -> None:
            stored = self._world.objects.get(key)
            if stored != body and etag != (None if stored is None else _etag(stored)):
                raise WriteConflict(f"{key!r} has changed since it was read")

        await self._put(key, body, check)
        return _etag(body)

    async def _put(self, key: str, body: bytes, check: Callable[[], None]) -> None:
        async def carried_out() -> None:
            await self._call("PUT")
            check()
            self._world.stored(key, body)

        # A sent request completes even if its caller is cancelled.
        await asyncio.shield(asyncio.create_task(carried_out()))

    async def keys(self, prefix: str) -> AsyncIterator[str]:
        self._world.list_tried[prefix] = self._world.now()
        await self._call("LIST")
        self._world.listed_at[prefix] = self._world.now()
        for key in sorted(key for key in self._world.objects if key.startswith(prefix)):
            yield key

    async def quarantine(self, run_id: str, what: str, reason: str, evidence: bytes) -> str:
        key = f"{quarantine_prefix('', run_id)}{self._world.number('quarantine')}"
        await self._call("PUT")
        self._world.objects[key] = json.dumps([what, reason]).encode()
        return key


def _etag(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


class SimQueue:
    """Replaces `AnnouncementQueue`."""

    url = "https://sqs/queue"
    is_shared = False

    def __init__(self, world: World, trainer: Trainer, wait_s: float = 20.0, visibility_s: float = 60.0) -> None:
        self._world = world
        self._trainer = trainer
        self._wait_s = wait_s
        self.visibility_s = visibility_s
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
            letter.visible_at = now + self.visibility_s
            found.append(Message(letter.body, letter.id, letter.id, letter.sent_at, letter.receives))
        return found

    async def delete(self, messages: Sequence[Message]) -> None:
        await self._world.passes(0.05)
        self._check()
        for message in messages:
            self.on_delete(message)
        gone = {message.receipt for message in messages}
        self._world.letters = [letter for letter in self._world.letters if letter.id not in gone]

    async def extend_visibility(self, messages: Sequence[Message]) -> None:
        await self._world.passes(0.05)
        self._check()
        held = {message.receipt for message in messages}
        for letter in self._world.letters:
            if letter.id in held:
                letter.visible_at = self._world.now() + self.visibility_s

    async def release(self, messages: Sequence[Message]) -> None:
        if not messages:
            return
        await self._world.passes(0.05)
        self._check()
        returned = {message.receipt for message in messages}
        for letter in self._world.letters:
            if letter.id in returned:
                letter.visible_at = self._world.now()

    def _check(self) -> None:
        if not self._trainer.alive:
            raise Killed
        if self._world.queue_gone or self._world.chance("sqs"):
            raise OSError("SQS does not answer")


class SimRuntime:
    """Replaces an `AgentRuntime`."""

    def __init__(self, world: World, trainer: Trainer, max_sessions: int = 256) -> None:
        self._world = world
        self._trainer = trainer
        self._max_sessions = max_sessions

    async def check(self) -> None: ...

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        world = self._world
        world.asked_for.add(session_id)
        await world.passes(0.5)
        if not self._trainer.alive:
            raise Killed
        body = json.loads(payload)
        request = RolloutRequest.parse(body[REQUEST_FIELD])
        refusal = self._refusal()
        if refusal is not None:
            assert world.outage is not None
            world.outage.invokes += 1
            if refusal.after and session_id not in world.sessions:
                world.open(request)
            raise refusal.make()
        if world.quota is not None and not world.quota.try_take(world.now()):
            raise Throttled("above the quota")
        if world.chance("throttled"):
            raise Throttled("slow down")
        if world.chance("quota") or len(world.sessions) >= self._max_sessions:
            raise QuotaExceeded("too many sessions")
        if world.chance("conflict"):
            raise RuntimeConflict("somebody else is at it")
        if world.chance("unavailable"):
            raise RuntimeUnavailable("503", refused=world.random.random() < 0.5)
        if world.chance("container") or world.poisoned(body["q"]):
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
        refusal = self._refusal()
        if refusal is not None and refusal.stops:
            raise refusal.make()
        if world.quota is not None and not world.quota.try_take(world.now()):
            raise Throttled("above the quota")
        if world.chance("stop_refused"):
            raise world.random.choice([Throttled("slow down"), RuntimeConflict("busy"), OutcomeUnknown("cut")])
        world.stopped.add(session_id)
        if session_id not in world.asked_for and not world.notes_lost:
            world.stopped_in_vain.append(session_id)
        session = world.sessions.pop(session_id, None)
        if session is not None:
            session.stopping = True
            if not world.chance("stop_unheard"):
                session.task.cancel()

    def _refusal(self) -> Refusal | None:
        outage = self._world.outage
        return outage.refusal if outage is not None and outage.since <= self._world.now() < outage.until else None

    async def aclose(self) -> None: ...


class SimArchive(RunArchive):
    """The run directory on a disk that may be full."""

    def __init__(self, world: World) -> None:
        def write(path: Path, data: bytes) -> None:
            if world.chance("disk_full"):
                raise OSError(errno.ENOSPC, "No space left on device")

        super().__init__(Path("run"), write)


class SimLines:
    """Replaces `StepFiles`."""

    def __init__(self, world: World, trainer: Trainer) -> None:
        self._world = world
        self._trainer = trainer

    def append(self, step: int, line: str) -> None:
        if not self._trainer.alive:
            raise Killed
        self._world.notes.setdefault(step, []).append(line)

    def read(self, step: int) -> list[str]:
        return self._world.notes.get(step, [])

    def delete(self, step: int) -> None:
        if not self._trainer.alive:
            raise Killed
        self._world.notes.pop(step, None)


class SimInFlightLog(InFlightLog):
    """The in-flight log in the simulated run directory."""

    def __init__(self, world: World, trainer: Trainer) -> None:
        super().__init__(SimLines(world, trainer))
        self._world = world
        self.is_open: Callable[[str], bool] = lambda rollout_id: False  # whether a rollout is not settled

    def record_closed(self, step: int, session_id: str) -> None:
        super().record_closed(step, session_id)
        session = self._world.sessions.get(session_id)
        if session is not None and self._world.at_work(session) and self.is_open(session.request.rollout_id):
            self._world.wasted.append(session.request.rollout_id)
        self._world.given_up.setdefault(session_id, self._world.now())
