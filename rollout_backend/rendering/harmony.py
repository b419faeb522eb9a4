"""Build the vocabulary file of gpt-oss's encoder from the model's folder.

OpenAI's encoder needs the file `o200k_base.tiktoken` and would download it. The model's tokenizer has the same
tokens, so this module builds the file from it; the encoder verifies the file's hash.
"""

import base64
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_FOLDER = "TIKTOKEN_ENCODINGS_BASE"
_FILE = "o200k_base.tiktoken"


@contextmanager
def vocabulary_of(tokenizer: Any) -> Iterator[None]:
    """Within this context, let the encoder find its vocabulary without a download.

    Raises:
        ValueError: the tokenizer is not that of gpt-oss. Building the file takes a second.
    """
    if not any(token.content == "<|channel|>" for token in tokenizer.added_tokens_decoder.values()):
        raise ValueError("its tokenizer has no token <|channel|>")
    if os.environ.get(_FOLDER):  # the user provides the file
        yield
        return
    with TemporaryDirectory(prefix="o200k-") as folder:
        (Path(folder) / _FILE).write_text(_tiktoken(tokenizer))
        os.environ[_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[_FOLDER]


def _tiktoken(tokenizer: Any) -> str:
    """Return the plain tokens in tiktoken's format: each token's bytes in base64, and its rank."""
    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    plain = sorted((rank, token) for token, rank in tokenizer.get_vocab().items() if token not in added)
    return "".join(
        f"{base64.b64encode(bytes(byte_of[char] for char in token)).decode()} {rank}\n" for rank, token in plain
    )
