"""Decode tokens, compute the bytes of each, and find stop strings in a reply.

The gateway never sends stop strings to SGLang. verl's servers run without a tokenizer (`skip_tokenizer_init`), where
SGLang 0.5.23 answers `stop` with 400 and 0.5.12 crashes.

Invariants:

- Unlike decoded text, bytes can be concatenated: the bytes of a reply are the bytes of its tokens in order. A
  character may span several tokens.
- Stop strings are matched in bytes, so they may span tokens and begin or end inside one.
- The string that completes first wins; among strings that complete at the same byte, the longest wins.
- Tokens that never appear as text, such as the end of a turn, are skipped and match no stop string.
"""

import codecs
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from rollout_backend.config.model import local_folder

# The name of a byte in a SentencePiece vocabulary.
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def decode(tokenizer: Any, ids: Iterable[int]) -> str:
    """Return the text of the ids, including the names of special tokens."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def any_of(names: Sequence[str]) -> re.Pattern[str]:
    """Match any of the names, the longest first. Grouped by prefix, because vocabularies may have thousands."""
    groups: dict[str, list[str]] = {}
    for name in sorted((name for name in names if len(name) > 1), key=len, reverse=True):
        groups.setdefault(name[:2], []).append(re.escape(name[2:]))
    patterns = (f"{re.escape(begin)}(?:{'|'.join(ends)})" for begin, ends in groups.items())
    return re.compile("|".join(patterns) or r"(?!)")


def token_bytes(tokenizer: Any) -> Mapping[int, bytes]:
    """Return the bytes of every token, by token id."""
    is_byte_level = tokenizer.convert_tokens_to_string(["a", "\u0120a"]) == "a a"
    spell = _byte_level if is_byte_level else _sentence_piece
    found = {int(token): spell(name) for name, token in tokenizer.get_vocab().items()}
    return found | {int(token): added.content.encode() for token, added in tokenizer.added_tokens_decoder.items()}


def _byte_level(name: str) -> bytes:
    try:
        return bytes(_BYTES[character] for character in name)
    except KeyError:
        return name.encode()


def _sentence_piece(name: str) -> bytes:
    fallback = _FALLBACK.fullmatch(name)
    return bytes([int(fallback[1], 16)]) if fallback else name.replace("\u2581", " ").encode()


def _gpt2_bytes() -> dict[str, int]:
    """Return the byte for each character of GPT-2's alphabet, which all byte-level vocabularies use.

    Printable bytes stand for themselves; the others are mapped to U+0100 and above.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _gpt2_bytes()


class TokenText:
    """Decodes token ids. A character that spans several tokens belongs to the last of them."""

    def __init__(self, spelled: Mapping[int, bytes]) -> None:
        self._spelled = spelled

    @classmethod
    def load(cls, model: str | Path) -> Self | None:
        """Load the tokenizer of a model folder; None if it has no readable one."""
        path = local_folder(Path(model), download=False) / "tokenizer.json"
        if not path.is_file():
            return None
        from tokenizers import Tokenizer

        try:
            return cls(token_bytes(_Adapter(Tokenizer.from_file(str(path)))))
        except Exception:
            # The package raises no more specific exception.
            return None

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return the text of each token. It may be empty."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [decoder.decode(self._spelled.get(token, b"\xef\xbf\xbd")) for token in ids]


class _Adapter:
    """The interface of a `transformers` tokenizer that `token_bytes` reads; importing that library takes seconds."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return (
            str(self._tokenizer.decoder.decode(tokens)) if self._tokenizer.decoder is not None else " ".join(tokens)
        )

    def get_vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab(with_added_tokens=False))

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        return dict(self._tokenizer.get_added_tokens_decoder())


class Stop(NamedTuple):
    tokens: int
    """Number of tokens, including the one in which the string completes."""
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
        self.borders = {string: _borders(string) for string in self._strings}
        # A match may begin this many bytes before a new token.
        self._before = max(map(len, self._strings), default=1) - 1

    def find(self, ids: Sequence[int], searched: int = 0) -> Stop | None:
        """Return where the first stop string completes; none may complete in the first `searched` tokens."""
        tail = self._tail(ids, searched)
        for n in range(searched, len(ids)):
            tail += self.bytes_of(ids[n])
            matches = [(at + len(stop), at, stop) for stop in self._strings if (at := tail.find(stop)) >= 0]
            if matches:
                return Stop(n + 1, self._strings[min(matches)[2]])
            tail = tail[len(tail) - self._before :] if len(tail) > self._before else tail
        return None

    def _tail(self, ids: Sequence[int], end: int) -> bytes:
        """Return the last of the first `end` tokens' bytes, as many as a match that ends later can include."""
        pieces: list[bytes] = []
        missing = self._before
        while end > 0 and missing > 0:
            end -= 1
            pieces.append(self.bytes_of(ids[end]))
            missing -= len(pieces[-1])
        tail = b"".join(reversed(pieces))
        return tail[len(tail) - self._before :] if len(tail) > self._before else tail

    def bytes_of(self, token: int) -> bytes:
        return b"" if token in self._silent else self._bytes.get(token, b"")


class ClearTokens:
    """Counts the tokens of one reply that cannot belong to a stop string. The work is linear in the new tokens."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        # For each string, the length of its prefix that ends the reply.
        self._matched = dict.fromkeys(stops.borders, 0)
        self._read = 0

    def count(self, ids: Sequence[int]) -> int:
        """Return how many tokens are clear. `ids` must extend the last call's ids, and complete no stop string."""
        for byte in b"".join(map(self._stops.bytes_of, ids[self._read :])):
            for string, borders in self._stops.borders.items():
                matched = self._matched[string]
                while matched and (matched == len(string) or string[matched] != byte):
                    matched = borders[matched]
                self._matched[string] = matched + (string[matched] == byte)
        self._read = n = len(ids)
        held = max(self._matched.values(), default=0)
        while held > 0:
            n -= 1
            held -= len(self._stops.bytes_of(ids[n]))
        return n


def _borders(string: bytes) -> list[int]:
    """Return, for each prefix of the string, the length of its longest proper prefix that is also its suffix."""
    borders, border = [0, 0], 0
    for byte in string[1:]:
        while border and string[border] != byte:
            border = borders[border]
        border += string[border] == byte
        borders.append(border)
    return borders
