"""Which requests of a session are the same call sent again, and get its answer instead of a second sample.

A request is a repetition if its body is that of an earlier one, byte for byte, and

- it says so (`x-stainless-retry-count` above 0, or an Idempotency-Key that was used before). It joins the earlier
  call in flight, or gets its answer. Not if that call failed: then it is simply made again. As many repetitions as
  were told of a failure are new calls: an agent may ask one question several times at once, and one of them fails.
- or the earlier call was answered, but its client had gone before it got the answer.

Any other identical request is a new sample: agents ask the same thing twice on purpose. A client that hangs up before
the answer aborts its call, so its repetition samples anew, and nothing of the first was recorded.

A gateway that was started again knows the answered calls from its journal. Whether a client had its answer it does
not, so only those that say so get it.

What must always hold: each session remembers at most `_KEPT` answered calls, the latest.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Mapping

from rollout_backend.gateway.call import Answer
from rollout_backend.gateway.running import Running

_KEPT = 16
_RETRY_COUNT, _IDEMPOTENCY_KEY = "x-stainless-retry-count", "idempotency-key"


class Repeatable:
    """What a request is known by. `says_so` is whether it says that it may be a repetition."""

    def __init__(self, dialect: str, body: bytes, headers: Mapping[str, str]) -> None:
        key = headers.get(_IDEMPOTENCY_KEY, "")
        retries = headers.get(_RETRY_COUNT, "")
        self.says_so = bool(key) or (retries.isdecimal() and int(retries) > 0)
        self.digest = hashlib.blake2b(f"{dialect}\0{key}\0".encode() + body, digest_size=16).digest()


class Replays:
    """The calls of one session that may be asked for again."""

    def __init__(self) -> None:
        self._calls: OrderedDict[bytes, list[Running]] = OrderedDict()  # by what was asked, the latest at the end
        self._before: OrderedDict[bytes, Answer] = OrderedDict()  # what an earlier process has answered
        self._failed: Counter[bytes] = Counter()  # times that a client was told of a failure and has not come again

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    def remember(self, digest: bytes, answer: Answer) -> None:
        """What an earlier process has answered, the oldest first."""
        self._before[digest] = answer
        self._before.move_to_end(digest)
        if len(self._before) > _KEPT:
            self._before.popitem(last=False)

    def find(self, asked: Repeatable) -> Running | Answer | None:
        """The call that this request repeats, or its answer, where that is all there is; None if it is a new one."""
        calls = self._calls.get(asked.digest, [])
        for running in reversed(calls):
            if running.abandoned:
                return running
        if not asked.says_so:
            return None
        if self._failed[asked.digest]:
            self._failed[asked.digest] -= 1
            return None
        for running in reversed(calls):
            if not running.done or running.answered:
                return running
        return self._before.get(asked.digest)

    def add(self, asked: Repeatable, running: Running) -> None:
        digest = asked.digest
        self._calls.setdefault(digest, []).append(running)
        self._calls.move_to_end(digest)
        running.task.add_done_callback(lambda _: self._settled(digest, running))

    def failed(self, asked: Repeatable) -> None:
        """The client was told that this request failed."""
        self._failed[asked.digest] += 1
        if len(self._failed) > _KEPT:
            self._failed.pop(next(iter(self._failed)))

    def _settled(self, digest: bytes, running: Running) -> None:
        if not running.answered:
            self._forget(digest, running)
            return
        answered = [(digest, call) for digest, calls in self._calls.items() for call in calls if call.answered]
        for old in answered[: max(0, len(answered) - _KEPT)]:
            self._forget(*old)

    def _forget(self, digest: bytes, running: Running) -> None:
        calls = self._calls[digest]
        calls.remove(running)
        if not calls:
            del self._calls[digest]
