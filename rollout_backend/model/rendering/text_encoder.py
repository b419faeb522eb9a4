"""Encode text in a fraction of the tokenizer's time, to exactly its tokens.

A byte-level BPE tokenizer splits text into words with regular expressions, and encodes each word alone. This module
splits ASCII text with the same expressions and keeps the tokens of words, so that only new words reach the tokenizer.

Invariants:

- The tokens equal the tokenizer's for the whole text. Text is split at added tokens, and between a letter and a mark
  or space, because no expression matches across these. The tokenizer itself encodes all text that is not ASCII.
- An encoder compares itself with the tokenizer when it is created, and is not used if they differ.
- The memory for words is bounded. One thread at a time encodes, and may do other work between two pieces.
"""

import itertools
import json
import logging
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import models

from rollout_backend.base.giving_way import let_others_go_first
from rollout_backend.model.rendering.token_bytes import any_of

logger = logging.getLogger(__name__)

_Ids = tuple[int, ...]
_MAX_WORDS, _MAX_WORD_CHARS = 32_768, 32
_PIECE_CHARS = 8192
# The tokenizer encodes a piece with more new words as a whole.
_MAX_NEW_WORDS = 512
_LETTER = "[A-Za-z\u0410-\u044f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]"
_CUT = re.compile(f'(?<={_LETTER})(?=[ \n"(),\u3001\u3002\uff0c])')
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The ASCII characters of Unicode's categories, as in a class of a regular expression.
_CATEGORIES = {
    "L": "A-Za-z",
    "Lu": "A-Z",
    "Ll": "a-z",
    "N": "0-9",
    "P": r"!-#%-*,-/:;?@\[-\]_{}",
    "S": r"$+<=>^`|~",
    **dict.fromkeys(("M", "Lt", "Lm", "Lo"), ""),
}
_CLASS_OR_CATEGORY = re.compile(r"\[\^?(?:\\.|[^\]\\])*\]|\\[pP]\{\w+\}")
_CATEGORY = re.compile(r"\\p\{(\w+)\}")
_NEVER = r"[^\x00-\U0010ffff]"
_TRIALS, _TRIAL_PARTS = 200, 40
_TRIAL_ALPHABET = [
    *"abcXYZ019 '\"\n\r\t.,:;!?-_/\\|<>{}[]()=+*&^%$#@~`\x00\x1c\x7f\v\f\u00e9\u4e2d\u3002\u0301",
    *("  ", "\n\n", "'s", "'LL", "word", " the", " \n"),
]


def accelerate(tokenizer: Any) -> None:
    """Replace `tokenizer.encode` by a faster equivalent, if this module knows how the tokenizer splits text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or (stages := _stages(tokenizer)) is None:
        return
    backend.no_truncation()
    backend.no_padding()
    if TextEncoder(tokenizer, stages, piece_chars=16).is_exact():
        tokenizer.encode = TextEncoder(tokenizer, stages).encode
    else:
        logger.warning("this tokenizer splits text in an unknown way, so prompts take several times longer to encode")


class TextEncoder:
    """Encodes text as a tokenizer does, and remembers its words."""

    def __init__(self, tokenizer: Any, stages: Sequence[re.Pattern[str]], piece_chars: int = _PIECE_CHARS) -> None:
        """Each of the `stages` splits ASCII text into words and the text between them. The next stage splits both."""
        added = tokenizer.added_tokens_decoder
        self._backend, self._encode = tokenizer.backend_tokenizer, tokenizer.encode
        self._stages, self._piece_chars = stages, piece_chars
        self._ids = {token.content: int(i) for i, token in added.items() if not token.normalized}
        self._any_added = any_of([token.content for token in added.values()])
        self._cuts = re.compile(f"({any_of([*self._ids]).pattern})")
        self._words = _Words()

    def encode(self, text: Any, *args: Any, **options: Any) -> list[int]:
        """Return the tokens. The tokenizer handles what no renderer passes."""
        is_usual = not args and options.keys() <= {"add_special_tokens", "split_special_tokens"}
        if not (is_usual and isinstance(text, str) and options.get("add_special_tokens") is False):
            try:
                return list(self._encode(text, *args, **options))
            finally:
                # The tokenizer remembers these options for its next text.
                self._backend.no_truncation()
                self._backend.no_padding()
        if len(text) <= self._piece_chars and text.isascii() and not self._any_added.search(text):
            known = self._known(text)
            let_others_go_first()
            return known
        ids: list[int] = []
        parts = [text] if options.get("split_special_tokens") else self._cuts.split(text)
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self._ids[part])
                continue
            for piece in self._pieces(part):
                if self._any_added.search(piece):
                    ids += self._encode(piece, **options)
                else:
                    ids += self._known(piece) if piece.isascii() else self._new(piece)
                let_others_go_first()
        return ids

    def _pieces(self, text: str) -> Iterator[str]:
        """Yield pieces, each ASCII if possible."""
        at = 0
        while at < len(text):
            cut = _CUT.search(text, at + self._piece_chars)
            end = len(text) if cut is None else cut.start()
            piece, at = text[at:end], end
            if piece.isascii():
                yield piece
            else:
                yield from ("".join(parts) for _, parts in itertools.groupby(_CUT.split(piece), str.isascii))

    def _known(self, text: str) -> list[int]:
        """Return the tokens of ASCII text without added tokens."""
        words, known = [text], self._words
        for stage in self._stages:
            words = [word for part in words for word in stage.split(part) if word]
        try:
            return list(itertools.chain.from_iterable(map(known.__getitem__, words)))
        except KeyError:
            unique = dict.fromkeys(words)
        # Adding words may drop the earlier generation, so look its words up first.
        found = {word: known[word] for word in unique if known.has(word)}
        new = [word for word in unique if word not in found]
        learned = {word: self._new(word) for word in new[:_MAX_NEW_WORDS]}
        known.add({word: ids for word, ids in learned.items() if len(word) <= _MAX_WORD_CHARS})
        if len(new) > _MAX_NEW_WORDS:
            return list(self._new(text))
        found |= learned
        return [token for word in words for token in found[word]]

    def _new(self, text: str) -> _Ids:
        # A batch is encoded without offsets and without the GIL.
        return tuple(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def is_exact(self) -> bool:
        """Compare this encoder with the tokenizer."""
        draw = random.Random(0)  # noqa: S311
        texts = ["".join(draw.choices(_TRIAL_ALPHABET, k=_TRIAL_PARTS)) for _ in range(_TRIALS)]
        return all(
            self.encode(text, add_special_tokens=False) == list(self._encode(text, add_special_tokens=False))
            for text in texts
        )


class _Words(dict[str, _Ids]):
    """Tokens by word, in two generations: the last `_MAX_WORDS` used words, and up to as many earlier ones."""

    def __init__(self) -> None:
        self._earlier: Mapping[str, _Ids] = {}

    def __missing__(self, word: str) -> _Ids:
        ids = self[word] = self._earlier[word]
        return ids

    def has(self, word: str) -> bool:
        return word in self or word in self._earlier

    def add(self, words: Mapping[str, _Ids]) -> None:
        if len(self) > _MAX_WORDS:
            self._earlier = dict(self)
            self.clear()
        self.update(words)


def _stages(tokenizer: Any) -> list[re.Pattern[str]] | None:
    """Return the expressions that split ASCII text as the tokenizer does; None if this cannot be said."""
    backend, added = tokenizer.backend_tokenizer, tokenizer.added_tokens_decoder.values()
    model = backend.model
    if not isinstance(model, models.BPE) or model.dropout or model.continuing_subword_prefix:
        return None
    if model.end_of_word_suffix or not _keeps_ascii(_state(backend.normalizer)):
        return None
    if any(token.lstrip or token.rstrip or token.single_word or len(token.content) < 2 for token in added):
        return None
    if any(_CUT.search(token.content) for token in added):
        return None
    splitting = _state(backend.pre_tokenizer)
    steps = splitting["pretokenizers"] if splitting.get("type") == "Sequence" else [splitting]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    try:
        patterns = [_pattern_of(step) for step in (steps if steps[-1]["use_regex"] else steps[:-1])]
        return [re.compile(f"({_in_ascii(pattern)})", re.ASCII) for pattern in patterns]
    except (KeyError, re.error):
        return None


def _state(part: Any) -> Mapping[str, Any]:
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _keeps_ascii(normalizer: Mapping[str, Any]) -> bool:
    if normalizer.get("type") == "Sequence":
        return all(map(_keeps_ascii, normalizer["normalizers"]))
    return normalizer.get("type") in (None, "NFC")


def _pattern_of(step: Mapping[str, Any]) -> str:
    """Return the regular expression of a step. Raises KeyError if it has none."""
    if step["type"] == "ByteLevel":
        return _GPT2
    if step["type"] == "Digits":
        return r"\p{N}" if step["individual_digits"] else r"\p{N}+"
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"]:
        raise KeyError(step["type"])
    return str(step["pattern"]["Regex"])


def _in_ascii(pattern: str) -> str:
    """Return an expression of Python that matches the same in ASCII text. Raises KeyError if there is none.

    A capturing group would change what `split` returns, and `&&` has another meaning in Python.
    """

    def translated(found: re.Match[str]) -> str:
        text = found[0] if found[0].startswith("[") else f"[{found[0]}]"
        text = _CATEGORY.sub(lambda category: _CATEGORIES[category[1]], text)
        return {"[]": _NEVER, "[^]": r"[\s\S]"}.get(text, text)

    in_ascii = _CLASS_OR_CATEGORY.sub(translated, pattern)
    if "&&" in pattern or re.compile(in_ascii).groups:
        raise KeyError(pattern)
    return in_ascii
