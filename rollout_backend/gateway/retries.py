"""Recognise retried requests: a retry gets the first request's answer instead of a second sample.

A request is a retry if its body equals that of an earlier request byte for byte, and one of these is true:

- It declares itself a retry: its `x-stainless-retry-count` is above 0, or its Idempotency-Key was used before. It
  then joins the earlier call, or gets its answer. If the earlier call failed, the request is a new call: each
  reported failure makes one retry a new call, because an agent may send a question several times in parallel.
- The earlier call was answered, but its client disconnected before it got the answer.

Any other identical request is a new sample: agents repeat questions on purpose. A client that disconnects before the
answer aborts its call, so its retry is sampled again; the aborted call left no record.

A restarted gateway restores answered calls from its journal. It does not know which answers were delivered, so only
requests that declare themselves retries get them.

Invariant: a session remembers at most its `_KEPT` latest answered calls.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Mapping

from rollout_backend.core.model_call import Answer
from rollout_backend.gateway.in_flight_call import InFlightCall

_KEPT = 16
_RETRY_COUNT, _IDEMPOTENCY_KEY = "x-stainless-retry-count", "idempotency-key"


class RequestKey:
    """Identifies a request by its digest. `is_declared` is whether it declares itself a retry."""

    def __init__(self, dialect: str, body: bytes, headers: Mapping[str, str]) -> None:
        key = headers.get(_IDEMPOTENCY_KEY, "")
        retries = headers.get(_RETRY_COUNT, "")
        self.is_declared = bool(key) or (retries.isdecimal() and bool(retries.strip("0")))
        self.digest = hashlib.blake2b(f"{dialect}\0{key}\0".encode() + body, digest_size=16).digest()


class RetryCache:
    """The calls of one session that may be retried."""

    def __init__(self) -> None:
        self._calls: OrderedDict[bytes, list[InFlightCall]] = OrderedDict()  # by digest, latest last
        self._before: OrderedDict[bytes, Answer] = OrderedDict()  # answered by an earlier process
        self._failed: Counter[bytes] = Counter()  # reported failures without a retry yet

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    def remember(self, digest: bytes, answer: Answer) -> None:
        """Add an answer of an earlier process. Call it in order, oldest first."""
        self._before[digest] = answer
        self._before.move_to_end(digest)
        if len(self._before) > _KEPT:
            self._before.popitem(last=False)

    def find(self, asked: RequestKey) -> InFlightCall | Answer | None:
        """Return the call that this request retries, or its answer if only that is left; None if it is new."""
        calls = self._calls.get(asked.digest, [])
        for running in reversed(calls):
            if running.abandoned:
                return running
        if not asked.is_declared:
            return None
        if self._failed[asked.digest]:
            self._failed[asked.digest] -= 1
            return None
        for running in reversed(calls):
            if running.answered or not (running.done or running.aborted):
                return running
        return self._before.get(asked.digest)

    def add(self, asked: RequestKey, running: InFlightCall) -> None:
        digest = asked.digest
        self._calls.setdefault(digest, []).append(running)
        self._calls.move_to_end(digest)
        running.task.add_done_callback(lambda _: self._settled(digest, running))

    def failed(self, asked: RequestKey) -> None:
        """Record that the client got an error for this request."""
        self._failed[asked.digest] += 1
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
