"""The fast encoder returns exactly the tokens of the tokenizer, whatever the text."""

import random

import pytest
from transformers import AutoTokenizer

from rollout_backend.model.rendering.text_encoder import TextEncoder, accelerate
from rollout_backend.workbench.local.scripted import BYTE_MODEL
from vocabularies import tokenizer_folder

NAMES = ("qwen3", "qwen3.5", "deepseek-v3", "gpt-oss", "llama-3", "glm-4.5")
ALPHABET = [*map(chr, range(128)), *"\u4e2d\u3002\uff0c\u0416\u017f\u00e9\u0301\ufdd0", "  ", "\n\n", "'s", " \n"]


@pytest.fixture(scope="module", params=NAMES)
def tokenizers(request):
    """The accelerated tokenizer and an untouched one."""
    folder = str(tokenizer_folder(request.param))
    fast, plain = (AutoTokenizer.from_pretrained(folder, local_files_only=True) for _ in range(2))
    accelerate(fast)
    assert isinstance(fast.encode.__self__, TextEncoder)
    return fast, plain


@pytest.mark.parametrize("split", [False, True])
def test_any_text_has_the_tokenizers_tokens(tokenizers, split):
    fast, plain = tokenizers
    draw = random.Random(7)
    names = [token.content for token in plain.added_tokens_decoder.values()]
    words = ["word ", "def ", "\u4e2d\u6587\u3002", "Hello", " 1234", "\n"]
    for size in (5, 60, 600, 8000):
        for _ in range(3):
            text = "".join(draw.choice(draw.choice((ALPHABET, ALPHABET, names, words))) for _ in range(size))
            options = {"add_special_tokens": False, "split_special_tokens": split}
            assert fast.encode(text, **options) == list(plain.encode(text, **options))


def test_other_arguments_are_left_to_the_tokenizer(tokenizers):
    fast, plain = tokenizers
    assert fast.encode("a text") == plain.encode("a text")
    assert fast.encode("a text", add_special_tokens=False, max_length=1, truncation=True) == plain.encode(
        "a text", add_special_tokens=False, max_length=1, truncation=True
    )
    # The tokenizer must not truncate the words that follow.
    text = "unprecedentedly xqzvk"
    assert fast.encode(text, add_special_tokens=False) == plain.encode(text, add_special_tokens=False)


def test_words_that_are_no_longer_used_are_forgotten(tokenizers, monkeypatch):
    fast, plain = tokenizers
    monkeypatch.setattr("rollout_backend.model.rendering.text_encoder._MAX_WORDS", 100)
    encoder = fast.encode.__self__
    for i in range(20):
        text = " ".join(f"{chr(97 + i)}{chr(97 + j)}x" for j in range(26)) + " often"
        assert fast.encode(text, add_special_tokens=False) == plain.encode(text, add_special_tokens=False)
    assert len(encoder._words) <= 200
    assert encoder._words.has(" often")
    assert not encoder._words.has("aax")


def test_a_tokenizer_without_known_expressions_is_not_replaced():
    tokenizer = AutoTokenizer.from_pretrained(str(BYTE_MODEL), local_files_only=True)
    tokenizer.backend_tokenizer.pre_tokenizer = None
    accelerate(tokenizer)
    assert "encode" not in tokenizer.__dict__
