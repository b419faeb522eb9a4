import json

import openai
import pytest

from builders import stream_data
from rollout_backend.model.dialects.openai_completions import OpenAICompletions
from rollout_backend.model.model_call import ApiError

CALL = {"model": "scripted", "prompt": "2 + 3 ="}
PATH = "/v1/completions"


@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids"])
def test_a_prompt_is_sent_to_the_engine_unchanged(play, form, byte_bundle):
    text = "<|im_start|>user\nHi \N{SNOWMAN}"
    ids = byte_bundle.tokenizer.encode(text)
    gateway = play([" 5"])
    prompt = {"text": text, "texts": [text], "ids": ids, "lists of ids": [ids]}[form]
    answer = gateway.client().completions.create(model="scripted", prompt=prompt, logprobs=0)
    assert gateway.engine.requests[0]["input_ids"] == ids
    assert (answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens) == (
        " 5",
        "stop",
        3,
    )
    assert answer.choices[0].logprobs.tokens[:2] == [" ", "5"]
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2]
    (segment,) = gateway.trajectory().segments
    assert (segment.messages[0]["content"], sum(segment.response_mask)) == (text, 3)


def test_token_ids_that_continue_a_call_extend_its_row(play, byte_bundle):
    gateway = play(["5", "9"])
    first = byte_bundle.tokenizer.encode("2 + 3 =")
    gateway.post({**CALL, "prompt": first}, path=PATH).raise_for_status()
    (sampled,) = (byte_bundle.tokenizer.encode("5<|im_end|>"),)
    more = byte_bundle.tokenizer.encode(" 4 + 5 =")
    gateway.post({**CALL, "prompt": [*first, *sampled, *more]}, path=PATH).raise_for_status()
    (segment,) = gateway.trajectory().segments
    assert (len(segment.turns), sum(segment.response_mask)) == (2, 4)


@pytest.mark.parametrize("choices", [1, 2])
def test_a_stream_is_the_whole_answer(play, choices):
    gateway = play(lambda _: "five")
    asked = {**CALL, "n": choices, "logprobs": 0, "stream_options": {"include_usage": True}}
    with gateway.stream(asked, path=PATH) as response:
        *chunks, last = stream_data(response.iter_lines())
    texts = [""] * choices
    tokens = [[] for _ in texts]
    for choice in (chunk["choices"][0] for chunk in chunks):
        texts[choice["index"]] += choice["text"]
        tokens[choice["index"]] += (choice["logprobs"] or {"tokens": []})["tokens"]
    assert texts == ["five"] * choices
    assert [len(each) for each in tokens] == [5] * choices
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5 * choices)


def test_a_reply_ends_at_its_limit_or_at_a_stop_string(play):
    gateway = play(lambda _: "one two three four five")
    client = gateway.client()
    assert client.completions.create(**CALL).usage.completion_tokens == 16  # this API's default
    assert client.completions.create(**CALL, stop=" three").choices[0].text == "one two"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "oneuser<tool_call>two"),
        ({"skip_special_tokens": False}, "one<|im_start|>user<tool_call>two"),
        ({"stop": "<|im_start|>"}, "oneuser<tool_call>two"),
        ({"stop": "<|im_start|>", "skip_special_tokens": False}, "one"),
    ],
)
def test_the_text_has_special_tokens_only_if_asked(play, more, text):
    gateway = play(["one<|im_start|>user<tool_call>two"])
    assert gateway.client().completions.create(**CALL, max_tokens=99, extra_body=more).choices[0].text == text


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"prompt": ["a", "b"]}, "prompt: holds 2 prompts; send one per call"),
        ({"prompt": []}, "prompt: is empty"),
        ({"prompt": [1.5]}, "prompt: must be a string or a list of token ids"),
        ({"prompt": [True]}, "prompt: must be a string or a list of token ids"),
        ({"logprobs": 3}, "logprobs: only the logprobs of sampled tokens"),
        ({"best_of": 3}, "best_of: all choices are returned"),
        ({"echo": True}, "echo: only what was sampled is returned"),
        ({"add_special_tokens": False}, "add_special_tokens: the tokenizer adds them to text"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fault, says):
    with pytest.raises(ApiError, match=f"^{says}"):
        OpenAICompletions().parse(json.dumps({**CALL, **fault}).encode())


@pytest.mark.parametrize("prompt", [[-1], [10**9], [2**70]])
def test_ids_outside_the_vocabulary_are_refused(shared_gateway, prompt):
    with pytest.raises(openai.BadRequestError, match="token ids of this model are below"):
        shared_gateway.client("ids").completions.create(model="scripted", prompt=prompt)
