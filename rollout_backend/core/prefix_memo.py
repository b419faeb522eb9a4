"""Digest conversations that grow: each message once, though every call repeats all of them. Pure.

Invariant: the digests are those of the messages that are passed, in every case. A conversation that was changed in
the middle is digested again from the first changed message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_KEPT = 4  # conversations: an agent may alternate between several

Message = Mapping[str, Any]
Step = Callable[[bytes, Sequence[Message], int], bytes]
"""Returns the digest of the messages up to the one at an index, from the digest of those before it. It must depend on
no later message."""


class PrefixMemo:
    """Remembers the digests of the latest conversations of one session. Their messages must not be changed.

    Threads may share one: each call replaces what is known as a whole, and the last one wins.
    """

    def __init__(self) -> None:
        self._known: list[tuple[object, list[Message], list[bytes]]] = []  # latest last

    def chain(self, messages: Sequence[Message], step: Step, context: object = None) -> list[bytes]:
        """Return, for each message, the digest of the conversation up to it.

        `context` is what `step` depends on besides its arguments: digests of another context are not reused.
        """
        known, given, shared, extended = self._known, list(messages), 0, None
        for i, (its_context, its_messages, _) in enumerate(known):
            if its_context == context and (same := common_prefix(its_messages, given)) > shared:
                shared, extended = same, i
        chain = [] if extended is None else known[extended][2][:shared]
        for i in range(shared, len(given)):
            chain.append(step(chain[-1] if chain else b"", given, i))
        if extended is not None and shared == len(known[extended][1]):
            known = [*known[:extended], *known[extended + 1 :]]
        self._known = [*known[1 - _KEPT :], (context, given, chain)]
        return chain


def common_prefix(some: Sequence[Message], other: Sequence[Message]) -> int:
    """Return with how many equal messages both begin."""
    n = min(len(some), len(other))
    if some[:n] == other[:n]:  # fast: identical objects are equal
        return n
    return next((i for i in range(n) if some[i] != other[i]), n)
