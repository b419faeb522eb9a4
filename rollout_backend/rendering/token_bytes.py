"""Compute the bytes of each token in a vocabulary, and decode sampled tokens one by one. A character may span
several tokens."""

import codecs
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from rollout_backend.config.model import local_folder

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # a byte in a SentencePiece vocabulary


def token_bytes(tokenizer: Any) -> Mapping[int, bytes]:
    """Return the bytes of every token, by token id.

    Unlike decoded text, bytes can be concatenated: the bytes of a reply are the bytes of its tokens in order.
    """
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
        except Exception:  # tokenizers raises no more specific exception
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
