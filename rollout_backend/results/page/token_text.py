"""Decode the text of each sampled token with the model's tokenizer.json."""

import codecs
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from rollout_backend.config.model import local_folder
from rollout_backend.rendering.token_bytes import token_bytes


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
