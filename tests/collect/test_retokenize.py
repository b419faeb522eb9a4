"""Messages are rendered into tokens: which count as sampled, what stays unknown, and what is refused."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from agent_wrapper.contract import Conversation, Rollout
from rollout_backend.collect.retokenize import Retokenizer, retokenize
from rollout_backend.config import ModelConfig
from rollout_backend.errors import ConfigError
from rollout_backend.local.scripted import BYTE_MODEL
from rollout_backend.rendering.renderer import RendererBundle, load_renderer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "5"},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "Thanks <|im_end|>"},
]


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The byte model with Qwen3's control tokens, whose renderer marks the tokens that it would have sampled."""
    path = tmp_path_factory.mktemp("qwen")
    tokenizer = AutoTokenizer.from_pretrained(str(BYTE_MODEL), local_files_only=True)
    names = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*names, "<|endoftext|>"]}, False)
    tokenizer.save_pretrained(str(path))
    return path


@pytest.fixture(scope="module", params=["chatml", "default", "qwen3"])
def bundle(request: pytest.FixtureRequest, qwen_folder: Path) -> RendererBundle:
    return load_renderer(
        ModelConfig(path=qwen_folder if request.param == "qwen3" else BYTE_MODEL, renderer=request.param)
    )


def conversation(*messages: dict, **more: object) -> Conversation:
    return Conversation.parse({"messages": list(messages or TALK), **more})


def sampled_texts(bundle: RendererBundle, segment) -> list[str]:
    return [bundle.decode(segment.token_ids[turn.start : turn.end]) for turn in segment.turns]


def test_replies_are_sampled_and_everything_else_is_given(bundle):
    plain = [message for message in TALK if message["role"] != "tool" and "tool_calls" not in message]
    (segment,) = retokenize(bundle, [conversation(*plain)])
    text = bundle.decode(segment.token_ids)
    assert [said.rpartition("</think>")[2].strip() for said in sampled_texts(bundle, segment)] == [
        "It is 5.<|im_end|>"
    ]
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n")
    assert segment.token_ids[segment.turns[-1].end - 1] in bundle.stop_token_ids
    assert segment.retokenized


def test_logprobs_and_versions_are_unknown(bundle):
    for segment in retokenize(bundle, [conversation(*TALK[:2], TALK[4], TALK[1], TALK[4], tools=TOOLS)]):
        assert all(math.isnan(logprob) for logprob in segment.logprobs)
        assert [(turn.weight_versions, turn.finish_reason) for turn in segment.turns] == [((), "unknown")] * len(
            segment.turns
        )
        assert segment.sampled_tokens


@pytest.mark.parametrize("bundle", ["chatml", "qwen3"], indirect=True)
def test_the_prompt_of_each_reply_is_what_the_gateway_would_have_sent(bundle):
    segments = retokenize(bundle, [conversation(tools=TOOLS)])
    turns = [(segment, turn) for segment in segments for turn in segment.turns]
    assert len(turns) == 2
    for (segment, turn), at in zip(turns, (2, 4), strict=True):
        prompt = bundle.render(TALK[:at], TOOLS)
        assert segment.token_ids[: turn.start].tolist()[: len(prompt)] == prompt
    (first, call), (last, answer) = turns
    assert '"name": "add"' in bundle.decode(first.token_ids[call.start : call.end])
    assert "It is 5." in bundle.decode(last.token_ids[answer.start : answer.end])


@pytest.mark.parametrize("bundle", ["default"], indirect=True)
def test_a_tool_call_that_the_template_omits_is_an_error(bundle):
    with pytest.raises(ValueError, match=r"messages\.2: its tool calls are missing"):
        retokenize(bundle, [conversation(tools=TOOLS)])


def test_only_listed_replies_count(bundle):
    (segment,) = retokenize(bundle, [conversation(replies=[4], tools=TOOLS)])
    assert len(segment.turns) == 1
    assert "It is 5." in sampled_texts(bundle, segment)[0]
    assert "Let me see." not in sampled_texts(bundle, segment)[0]


def test_each_conversation_becomes_a_segment(bundle):
    other = [{"role": "user", "content": "another"}, {"role": "assistant", "content": "matter"}]
    first, last = retokenize(bundle, [conversation(*TALK[:2], TALK[4]), conversation(*other)])
    assert (first.split_reason, last.split_reason) == ("first_call", "retokenized")
    assert [message["content"] for message in last.messages] == ["another", "matter"]


def test_content_parts_are_joined_to_text(bundle):
    parts = {"role": "user", "content": [{"type": "text", "text": "2 +"}, {"type": "text", "text": " 3?"}]}
    [one], [other] = (retokenize(bundle, [conversation(first, TALK[4])]) for first in (parts, TALK[1]))
    assert (one.token_ids, one.response_mask, one.messages) == (other.token_ids, other.response_mask, other.messages)


def test_a_template_that_drops_history_begins_a_new_segment(qwen_folder):
    bundle = load_renderer(ModelConfig(path=qwen_folder, renderer="qwen3"))
    talk = [
        TALK[1],
        {"role": "assistant", "content": "5", "reasoning_content": "two and three"},
        {"role": "user", "content": "and 1?"},
        {"role": "assistant", "content": "6", "reasoning_content": "five and one"},
    ]
    first, second = retokenize(bundle, [conversation(*talk)])
    assert "two and three" in sampled_texts(bundle, first)[0]
    assert "two and three" not in bundle.decode(second.token_ids)
    assert sampled_texts(bundle, second)[0].endswith("6<|im_end|>")
    assert "five and one" in sampled_texts(bundle, second)[0]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([TALK[4]], "messages.0 is a reply to nothing"),
        ([{"role": "user", "content": [{"type": "image_url"}]}, TALK[4]], "conversations.0.messages.0.content.0"),
        ([{"role": "critic", "content": "?"}, TALK[4]], "conversations.0.messages.0.role"),
        (
            [
                TALK[1],
                {
                    "role": "assistant",
                    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "[1]"}}],
                },
            ],
            "conversations.0.messages.1.tool_calls.0.function.arguments",
        ),
    ],
)
def test_an_error_names_the_message_that_cannot_be_rendered(bundle, messages, words):
    with pytest.raises(ValueError, match="conversations") as caught:
        retokenize(bundle, [conversation(*messages)])
    assert words in str(caught.value)


def test_a_template_that_does_not_extend_its_prompt_is_refused(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(str(BYTE_MODEL), local_files_only=True)
    tokenizer.chat_template = (
        "{% for m in messages | reverse %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    tokenizer.save_pretrained(str(tmp_path))
    bundle = load_renderer(ModelConfig(path=tmp_path, renderer="default"))
    with pytest.raises(
        ValueError, match=r"messages\.1: the model's template does not render it as an extension of its prompt"
    ):
        retokenize(bundle, [conversation(TALK[1], TALK[4])])


# --- whole rollouts ---------------------------------------------------------------------------------------


@pytest.fixture
async def retokenizer():
    made = await Retokenizer.open(ModelConfig(path=BYTE_MODEL))
    yield made
    made.close()


def messages_only(make_rollout, *messages: dict, **more: object) -> Rollout:
    return make_rollout(segments=[], conversations=[conversation(*messages)], **more)


async def test_a_messages_only_rollout_becomes_trainable_and_keeps_its_messages(retokenizer, make_rollout):
    before = messages_only(make_rollout, *TALK[:2], TALK[4])
    after = await retokenizer(before)
    assert (before.trainable, after.trainable, after.retokenized, after.messages_only) == (False, True, True, False)
    assert after.conversations == before.conversations
    assert Rollout.decode(after.encode()).encode() == after.encode()


async def test_a_sampled_rollout_is_unchanged(retokenizer, make_rollout):
    rollout = make_rollout()
    assert await retokenizer(rollout) is rollout


async def test_a_failure_is_not_rendered(retokenizer, make_rollout):
    rollout = messages_only(make_rollout, *TALK[:2], TALK[4], outcome="agent_error")
    assert await retokenizer(rollout) is rollout


async def test_a_rollout_that_cannot_be_rendered_stays_messages_only_with_a_warning(
    retokenizer, make_rollout, caplog
):
    rollout = messages_only(make_rollout, {"role": "critic", "content": "?"}, TALK[4])
    with caplog.at_level(logging.WARNING):
        assert await retokenizer(rollout) is rollout
    assert "rollout task-a.0 stays messages-only and is not trained: conversations.0.messages.0.role" in caplog.text


async def test_a_model_without_a_renderer_is_refused_at_start(tmp_path):
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        await Retokenizer.open(ModelConfig(path=tmp_path))
