"""Find stop strings in the tokens of a reply while it is sampled. Pure.

The gateway never sends stop strings to SGLang. verl's servers run without a tokenizer (`skip_tokenizer_init`), where
SGLang 0.5.23 answers `stop` with 400 and 0.5.12 crashes.

Invariants:

- Stop strings are matched in the bytes of the tokens, so they may span tokens and begin or end inside one.
- The string that completes first wins; among strings that complete at the same byte, the longest wins.
- Tokens that never appear as text, such as the end of a turn, are skipped and match no stop string.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Stop(NamedTuple):
    tokens: int  # including the one in which the string completes
    string: str


class StopStrings:
    """The stop strings of one call."""

    def __init__(
        self, strings: Collection[str], token_bytes: Mapping[int, bytes], silent_tokens: Collection[int] = ()
    ) -> None:
        self.strings = tuple(strings)
        self._strings = {string.encode(errors="surrogatepass"): string for string in strings}
        self._bytes = token_bytes
        self._silent = frozenset(silent_tokens)
        self._before = max(map(len, self._strings), default=1) - 1  # bytes of a match that may precede a new token

    def find(self, ids: Sequence[int], searched: int = 0) -> Stop | None:
        """Return where the first stop string completes; none may complete in the first `searched` tokens."""
        tail = self._tail(ids, searched)
        for n in range(searched, len(ids)):
            tail += self._bytes_of(ids[n])
            matches = [(at + len(stop), at, stop) for stop in self._strings if (at := tail.find(stop)) >= 0]
            if matches:
                return Stop(n + 1, self._strings[min(matches)[2]])
            tail = tail[len(tail) - self._before :] if len(tail) > self._before else tail
        return None

    def clear(self, ids: Sequence[int]) -> int:
        """Return how many of the tokens cannot belong to a stop string. None may have completed in them."""
        tail = self._tail(ids, len(ids))
        held = next(
            (
                n
                for n in range(min(self._before, len(tail)), 0, -1)
                if any(s.startswith(tail[-n:]) for s in self._strings)
            ),
            0,
        )
        n = len(ids)
        while held > 0:
            n -= 1
            held -= len(self._bytes_of(ids[n]))
        return n

    def _tail(self, ids: Sequence[int], end: int) -> bytes:
        """Return the last of the first `end` tokens' bytes, as many as a match that ends later can include."""
        pieces: list[bytes] = []
        missing = self._before
        while end > 0 and missing > 0:
            end -= 1
            pieces.append(self._bytes_of(ids[end]))
            missing -= len(pieces[-1])
        tail = b"".join(reversed(pieces))
        return tail[len(tail) - self._before :] if len(tail) > self._before else tail

    def _bytes_of(self, token: int) -> bytes:
        return b"" if token in self._silent else self._bytes.get(token, b"")
