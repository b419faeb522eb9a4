"""Recognise retried requests: a retry gets the first request's answer instead of a second sample.

A request is a retry if its body equals that of an earlier request byte for byte, and one of these is true:

- It declares itself a retry: its `x-stainless-retry-count` is above 0, or its Idempotency-Key was used before. It
  then joins the earlier call, or gets its answer. If the attempt that it repeats failed or was aborted, the request
  is a new call. An agent may ask the same question several times, so each failed attempt turns one retry into a new
  call. An Idempotency-Key identifies the attempt, so it needs no such count.
- The earlier call was answered, but its client disconnected before it got the answer.

Any other identical request is a new sample: agents repeat questions on purpose. A client that disconnects before the
answer aborts its call, so its retry is sampled again; the aborted call left no record.

A restarted gateway restores answered and unanswered attempts from its journal. It does not know which answers were
delivered, so only requests that declare themselves retries get them.

Invariant: a session remembers at most its `_KEPT` latest answered calls.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Mapping

from rollout_backend.core.model_call import Answer
from rollout_backend.gateway.in_flight_call import InFlightCall

_KEPT = 16
_RETRY_COUNT, _IDEMPOTENCY_KEY = "x-stainless-retry-count", "idempotency-key"


class RequestKey:
    """Identifies a request by its digest. `is_declared`: it declares itself a retry; `is_keyed`: it has an
    Idempotency-Key."""

    def __init__(self, dialect: str, body: bytes, headers: Mapping[str, str]) -> None:
        key = headers.get(_IDEMPOTENCY_KEY, "")
        retries = headers.get(_RETRY_COUNT, "")
        self.is_keyed = bool(key)
        self.is_declared = self.is_keyed or (retries.isdecimal() and bool(retries.strip("0")))
        self.digest = hashlib.blake2b(f"{dialect}\0{key}\0".encode() + body, digest_size=16).digest()


class RetryCache:
    """The calls of one session that clients may retry."""

    def __init__(self) -> None:
        self._calls: OrderedDict[bytes, list[InFlightCall]] = OrderedDict()  # by digest, latest last
        self._before: OrderedDict[bytes, tuple[bytes, Answer]] = (
            OrderedDict()
        )  # of an earlier process, with questions
        self._failed: Counter[bytes] = Counter()  # attempts that failed and were not retried yet, by question

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    def remember(self, digest: bytes, question: bytes, answer: Answer) -> None:
        """Add an answer of an earlier process. Add them in order, oldest first."""
        self._before[digest] = question, answer
        self._before.move_to_end(digest)
        if len(self._before) > _KEPT:
            self._before.popitem(last=False)

    def find(self, asked: RequestKey) -> InFlightCall | Answer | None:
        """Return the call that this request retries, or its answer if the call is gone; None for a new request."""
        calls = self._calls.get(asked.digest, [])
        for running in reversed(calls):
            if running.abandoned:
                return running
        if not asked.is_declared:
            return None
        for running in reversed(calls):
            if running.answered or not (running.done or running.aborted):
                return None if self._is_lost(asked, running.question) else running
        question, answer = self._before.get(asked.digest, (b"", None))
        return None if self._is_lost(asked, question) else answer

    def _is_lost(self, asked: RequestKey, question: bytes) -> bool:
        """Return whether this may be a retry of an attempt that got no answer."""
        return not asked.is_keyed and self._failed[question] > 0

    def add(self, asked: RequestKey, running: InFlightCall) -> None:
        digest = asked.digest
        if asked.is_declared and self._failed[running.question]:
            self._failed[running.question] -= 1
        self._calls.setdefault(digest, []).append(running)
        self._calls.move_to_end(digest)
        running.task.add_done_callback(lambda _: self._settled(digest, running))

    def failed(self, question: bytes, attempts: int = 1) -> None:
        """Record attempts at this question that failed or were aborted."""
        self._failed[question] += attempts
        if len(self._failed) > _KEPT:
            self._failed.pop(next(iter(self._failed)))

    def _settled(self, digest: bytes, running: InFlightCall) -> None:
        if not running.answered:
            self._forget(digest, running)
            return
        answered = [(digest, call) for digest, calls in self._calls.items() for call in calls if call.answered]
        for old in answered[: max(0, len(answered) - _KEPT)]:
            self._forget(*old)

    def _forget(self, digest: bytes, running: InFlightCall) -> None:
        calls = self._calls[digest]
        calls.remove(running)
        if not calls:
            del self._calls[digest]
