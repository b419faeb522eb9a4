"""Hold a session's model calls: those in flight, and answered ones that clients may retry.

A request is a retry if its body equals that of an earlier request byte for byte, and one of these is true:

- It declares itself a retry: its `x-stainless-retry-count` is above 0, or its Idempotency-Key was used before. It
  then joins the earlier call, or gets its answer. If the attempt that it repeats failed or was aborted, the request
  is a new call. An agent may ask the same question several times, so each failed attempt turns one retry into a new
  call. An Idempotency-Key identifies the attempt, so it needs no such count.
- Without a key, the gateway does not know which of several equal calls a retry repeats, or whether the first attempt
  arrived: its connection may have been refused. A client's count grows with each attempt, so a call whose latest
  attempt has the same count belongs to another client. If several calls remain, the request is a new call, unless the
  latest of them precedes a restart. If one call remains, it is the match, although it may be another client's.
- The earlier call was answered, but its client disconnected before it got the answer.

Any other identical request is a new sample, because agents repeat questions on purpose. A client that disconnects
before the answer aborts its call, so its retry is sampled again. The tokens of an aborted stream are kept for a call
that continues it.

A restarted gateway restores answered and unanswered attempts from its journal. It does not know which answers were
delivered, so only requests that declare themselves retries get them.

Invariants:

- Every listener gets all deltas from the beginning. A call without listeners is aborted.
- An answered call keeps its answer but not its question, because each call repeats all messages before it.
- A session remembers at most its `MAX_ANSWERS` latest answered calls.
"""

import asyncio
import hashlib
import time
from collections import Counter, deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from rollout_backend.base.names import random_name
from rollout_backend.model.gateway.sessions.conversations import Prompt, RecordedReply
from rollout_backend.model.model_call import Answer, Delta, Message, ModelCall, session_closed, whole_deltas
from rollout_backend.model.rendering.segments import Completion

MAX_ANSWERS = 16
_RETRY_COUNT, _IDEMPOTENCY_KEY = "x-stainless-retry-count", "idempotency-key"


@dataclass(frozen=True)
class RequestKey:
    """Identifies a request by its digest, and its question by the digest of its messages and tools."""

    digest: bytes = b""
    question: bytes = b""
    attempt: int = 0
    """The number of retries before it, if its client counts them."""
    is_declared: bool = False
    is_keyed: bool = False

    @classmethod
    def of(cls, dialect: str, body_digest: bytes, headers: Mapping[str, str], question: bytes = b"") -> Self:
        key = headers.get(_IDEMPOTENCY_KEY, "")
        retries = headers.get(_RETRY_COUNT, "")
        attempt = int(retries[:9]) if retries.isdecimal() else 0
        digest = hashlib.blake2b(f"{dialect}\0{key}\0".encode() + body_digest, digest_size=16).digest()
        return cls(digest, question, attempt, is_declared=bool(key) or attempt > 0, is_keyed=bool(key))


@dataclass(eq=False, repr=False)
class InFlightCall:
    """A model call in flight. A listener calls `join`, sets `delivered` once it has the answer, and calls `leave`."""

    call: ModelCall
    key: RequestKey = RequestKey()
    brief: bool = True
    """True if the event loop may render the prompt."""
    left_out: bool = False
    id: str = field(default_factory=random_name)
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_tokens: int | None = None
    deltas: list[Delta] = field(default_factory=list)
    delivered: bool = False
    restored: bool = False
    replies: list[RecordedReply] = field(default_factory=list)
    sampled: list[tuple[Prompt, Completion]] = field(default_factory=list)
    aborted: bool = False
    """True if no listener is left. The task may still be ending."""
    given_up: bool = False
    attempt: int = 0
    task: asyncio.Future[Answer] = field(init=False)
    _listeners: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.attempt = self.key.attempt

    @classmethod
    def answered_before(cls, key: RequestKey, answer: Answer) -> Self:
        """Return a call that an earlier process of this gateway answered."""
        call = cls(
            ModelCall(answer.model, ()),
            key,
            id=answer.id,
            created=answer.created,
            prompt_tokens=answer.prompt_tokens,
            deltas=_deltas_of(answer),
            delivered=True,
            restored=True,
        )
        call.task = asyncio.get_running_loop().create_future()
        call.task.set_result(answer)
        return call

    @property
    def done(self) -> bool:
        return self.task.done()

    @property
    def answered(self) -> bool:
        task = self.task
        return task.done() and not task.cancelled() and task.exception() is None

    @property
    def abandoned(self) -> bool:
        """True if the call has an answer that was not delivered and no client waits for it."""
        return self.answered and not self._listeners and not self.delivered

    def start(self, work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        task = self.task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def set_prompt_tokens(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self._notify()

    def emit(self, deltas: Sequence[Delta]) -> None:
        if deltas:
            self.deltas += deltas
            self._notify()

    async def wait_for_more(self, known: int, timeout_s: float | None = None) -> bool:
        """Wait for more than `known` deltas or for the end of the call. Return False after a timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.deltas) <= known and not self.done:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def said(self) -> list[Message]:
        """Return what the client of a stream may have read of each choice."""
        read: list[dict[str, list[str]]] = [{"content": [], "reasoning_content": []} for _ in range(self.call.n)]
        for delta in self.deltas:
            read[delta.choice]["reasoning_content" if delta.kind == "reasoning" else "content"].append(delta.text)
        return [{"role": "assistant", **{name: "".join(texts) for name, texts in each.items()}} for each in read]

    def outcome(self) -> Answer:
        """Return the answer of a finished call, or raise its error."""
        if self.task.cancelled():
            raise session_closed("its calls were aborted")
        return self.task.result()

    def join(self) -> None:
        self._listeners += 1

    def leave(self, *, given_up: bool = False) -> bool:
        """Remove a listener. Return True if this was the last one, which aborts the call.

        `given_up` means that the client disconnected; otherwise the gateway stops, and the call may be repeated.
        """
        self._listeners -= 1
        self.given_up = given_up and not self._listeners
        # A later listener gets whole deltas.
        if not self._listeners and self.call.stream and self.answered:
            self.deltas = _deltas_of(self.task.result())
        self.aborted = not self._listeners and self.task.cancel()
        return self.aborted

    def _ended(self, task: asyncio.Future[Answer]) -> None:
        self.call = replace(self.call.without_question(), dialect_data=None)
        if not task.cancelled():
            # Mark the exception as retrieved, in case there is no listener.
            task.exception()
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _deltas_of(answer: Answer) -> list[Delta]:
    return [
        delta
        for i, choice in enumerate(answer.choices)
        for delta in whole_deltas(choice.message, i, choice.logprobs or ())
    ]


class RetryCache:
    """The calls of one session that clients may retry."""

    def __init__(self) -> None:
        self.undelivered: set[InFlightCall] = set()
        """The calls in flight, and answered ones whose answer no client has received."""
        # Calls by digest; answered calls, oldest first; and by question, failed attempts that were not retried yet.
        self._calls: dict[bytes, list[InFlightCall]] = {}
        self._answered: deque[InFlightCall] = deque()
        self._failed: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    def remember(self, key: RequestKey, answer: Answer) -> None:
        """Add an answer of an earlier process. Add them in order, oldest first."""
        self._keep(InFlightCall.answered_before(key, answer))

    def find(self, asked: RequestKey) -> InFlightCall | None:
        """Return the call that this request retries, as its latest attempt; None for a new request."""
        running = self._find(asked)
        if running is not None:
            running.attempt = max(running.attempt, asked.attempt)
        return running

    def _find(self, asked: RequestKey) -> InFlightCall | None:
        calls = self._calls.get(asked.digest, [])
        for running in reversed(calls):
            if running.abandoned:
                return running
        joinable = [each for each in calls if each.answered or not (each.done or each.aborted)]
        if not asked.is_declared or not joinable:
            return None
        if asked.is_keyed:
            return joinable[-1]
        # This may be a retry of an attempt that got no answer.
        if self._failed[joinable[-1].key.question]:
            return None
        earlier = [each for each in joinable if each.attempt < asked.attempt]
        before = [each for each in earlier if each.attempt == asked.attempt - 1] or earlier
        return before[-1] if len(before) == 1 or (before and before[-1].restored) else None

    def add(self, running: InFlightCall) -> None:
        key = running.key
        if key.is_declared and self._failed[key.question]:
            self._failed[key.question] -= 1
        self.undelivered.add(running)
        self._keep(running)

    def _keep(self, running: InFlightCall) -> None:
        self._calls.setdefault(running.key.digest, []).append(running)
        running.task.add_done_callback(lambda _: self._settled(running))

    def failed(self, question: bytes, attempts: int = 1) -> None:
        """Record attempts at this question that failed or were aborted."""
        self._failed[question] += attempts
        if len(self._failed) > MAX_ANSWERS:
            self._failed.pop(next(iter(self._failed)))

    def _settled(self, running: InFlightCall) -> None:
        if not running.answered:
            self.undelivered.discard(running)
            self._forget(running)
            return
        self._answered.append(running)
        if len(self._answered) > MAX_ANSWERS:
            self._forget(self._answered.popleft())

    def _forget(self, running: InFlightCall) -> None:
        calls = self._calls[running.key.digest]
        calls.remove(running)
        if not calls:
            del self._calls[running.key.digest]
