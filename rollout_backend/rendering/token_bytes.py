"""Compute the bytes of each token in a vocabulary. A character may span several tokens. Pure."""

import re
from collections.abc import Mapping
from typing import Any

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
