"""Tool calls and reasoning of each family: sampled, parsed, sent back as agents do, and continued."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from builders import tool_result, user
from rollout_backend.config import ModelConfig
from rollout_backend.local.scripted import ScriptedEngine
from rollout_backend.rendering.renderer import load_renderer

USER = user("What is 1 + 2?")
NESTED = {"text": 'Grüße "日本" 🙂\n\ttab \\ back', "options": {"a": [1, {"b": None}], "c": {"d": True}}}
# The others drop earlier reasoning at a new question, so what follows is another sequence of tokens.
CONTINUES_AT_A_QUESTION = ("llama-3", "deepseek-v3")


@pytest.fixture(scope="session")
def engine_of(folder_of):
    """One scripted engine for each family; each session has another script."""
    made: dict[str, ScriptedEngine] = {}

    def of(family) -> ScriptedEngine:
        if family.tokenizer not in made:
            made[family.tokenizer] = ScriptedEngine((), folder_of(family), end=None).__enter__()
        return made[family.tokenizer]

    yield of
    for engine in made.values():
        engine.__exit__(None, None, None)


class Agent:
    """Call a gateway without keeping a history: each test says what it sends back."""

    def __init__(self, served, engine, tools) -> None:
        self._served, self._engine, self._tools = served, engine, tools
        self._client = served.client("s1")

    def script(self, *replies: str) -> None:
        self._engine.script("s1", replies)

    def ask(self, messages, **more):
        made = self._client.chat.completions.create(model="m", messages=messages, tools=self._tools, **more)
        return made.choices[0]

    def segments(self):
        return self._served.trajectory("s1").segments

    def malformed(self) -> int:
        return self._served.stats().malformed_tool_calls


@pytest.fixture
def agent(family, bundle, engine_of, folder_of, serve, tools):
    engine = engine_of(family)
    model = ModelConfig(path=folder_of(family), renderer=family.renderer, name="m", context_length=8192)
    return Agent(serve(engine.url, model=model, bundle=bundle), engine, tools)


def result(call) -> dict[str, Any]:
    return tool_result(call.id, "3")


def as_returned(message) -> dict[str, Any]:
    return message.model_dump(exclude_none=True)


def without_reasoning(message) -> dict[str, Any]:
    return {"content": None, **message.model_dump(include={"role", "content", "tool_calls"})}


def empty_content(message) -> dict[str, Any]:
    return {**as_returned(message), "content": message.content or ""}


def respaced(message) -> dict[str, Any]:
    sent = as_returned(message)
    for call in sent["tool_calls"]:
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
    return sent


@pytest.mark.parametrize("send", [as_returned, without_reasoning, empty_content, respaced])
def test_a_tool_conversation_is_one_sequence(family, agent, send):
    thought = "One and two." if family.reasons else None
    first = family.say(thought, "", [("add", '{"a": 1, "b": 2}')])
    last = family.say(thought, "It is 3.", [])
    agent.script(first, last)
    called = agent.ask([USER])
    assert called.finish_reason == "tool_calls"
    assert getattr(called.message, "reasoning_content", None) == thought
    (call,) = called.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    answer = agent.ask([USER, send(called.message), result(call)])
    assert (answer.finish_reason, answer.message.content) == ("stop", "It is 3.")
    assert not answer.message.tool_calls
    (segment,) = agent.segments()
    assert len(segment.turns) == 2
    assert agent.malformed() == 0


def test_nested_arguments_with_escapes_are_parsed(family, agent):
    agent.script(family.say(None, "", [("write", json.dumps(NESTED, ensure_ascii=False))]))
    (call,) = agent.ask([USER]).message.tool_calls
    assert json.loads(call.function.arguments) == NESTED


def test_several_calls_in_one_reply(family, agent):
    if not family.parallel:
        pytest.skip("one call is all that this format has in a turn")
    calls = [("add", '{"a": 1, "b": 2}'), ("write", '{"text": "x"}')]
    agent.script(family.say(None, "Both.", calls), family.say(None, "Done.", []))
    choice = agent.ask([USER])
    found = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in found] == [
        (name, json.loads(arguments)) for name, arguments in calls
    ]
    assert len({call.id for call in found}) == 2
    assert choice.message.content == "Both."
    agent.ask([USER, as_returned(choice.message), *(result(call) for call in found)])
    assert [len(segment.turns) for segment in agent.segments()] == [2]


def test_a_new_question_continues_the_segment_where_the_template_allows(family, agent):
    thought = "Easy." if family.reasons else None
    agent.script(family.say(thought, "3", []), family.say(thought, "4", []))
    first = agent.ask([USER])
    agent.ask([USER, as_returned(first.message), user("And 2 + 2?")])
    turns = [len(segment.turns) for segment in agent.segments()]
    if family.name in CONTINUES_AT_A_QUESTION:
        assert turns == [2]
    else:
        assert turns == [1, 1]
        assert agent.segments()[1].split_reason == "rerendered"


@pytest.mark.parametrize("thought", [None, "", "Hm."])
def test_an_answer_with_and_without_reasoning(family, agent, thought):
    if thought is not None and not family.reasons:
        pytest.skip("a family without reasoning")
    agent.script(family.say(thought, "Grüße 日本 🙂", []))
    choice = agent.ask([USER])
    assert choice.message.content == "Grüße 日本 🙂"
    assert (getattr(choice.message, "reasoning_content", None) or "") == (thought or "")
    assert choice.finish_reason == "stop"


def test_reasoning_cut_by_the_limit(family, agent):
    if not family.reasons:
        pytest.skip("a family without reasoning")
    said = family.say("A long thought " * 20, "never said", [])
    agent.script(said, family.say("x", "Done.", []))
    choice = agent.ask([USER], max_completion_tokens=12)
    assert choice.finish_reason == "length"
    assert choice.message.content == ""
    assert choice.message.reasoning_content.lstrip().startswith("A long thought")
    again = agent.ask([USER, as_returned(choice.message), user("And?")])
    assert again.message.content == "Done."


def text_of_broken_call(family, agent, said: str, **more) -> tuple[str, str]:
    """Sample `said`. Check that it is no call, is counted, and can be continued; return its text and why it ended."""
    agent.script(said, family.say("x", "Done.", []))
    choice = agent.ask([USER], **more)
    assert not choice.message.tool_calls
    assert agent.malformed() == 1
    again = agent.ask([USER, as_returned(choice.message), user("That was no call.")])
    assert again.message.content == "Done."
    return choice.message.content, choice.finish_reason


def test_a_call_cut_by_the_limit_is_text(family, agent):
    said = family.say(None, "", [("write", json.dumps({"text": "word " * 60}))])
    text, finish = text_of_broken_call(family, agent, said, max_completion_tokens=50)
    assert finish == "length"
    assert "word word" in text


@pytest.mark.parametrize(
    "arguments",
    ['{"a": 1,}', '{"a": "x', "{'a': 1}", "[1, 2]", '"text"', "5", '{"a": NaN}', '{"a": ' * 1500 + "1" + "}" * 1500],
    ids=["comma", "open", "quotes", "list", "string", "number", "nan", "deep"],
)
def test_broken_arguments_are_text_and_counted(family, agent, arguments):
    if not family.carries_broken_json:
        pytest.skip("this format writes arguments without JSON around them")
    text, finish = text_of_broken_call(family, agent, family.say(None, "", [("add", arguments)]))
    assert finish == "stop"
    assert arguments[:5] in text


# Text that each family's parser drops, or returns as plain content.
LOST = {
    "qwen3": "Well.\n<tool_call>\n",
    "gpt-oss": 'Hm.<|end|><|start|>assistant to=functions.add<|channel|>commentary json{"a": 1}<|call|>',
    "llama-3": '<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eot_id|>',
    "glm-5": "Hm.</think>Well.<tool_call>",
    "deepseek-v3": "Well.<\uff5ctool\u2581calls\u2581begin\uff5c>add it<\uff5cend\u2581of\u2581sentence\uff5c>",
}


def test_an_incomplete_call_is_returned_as_text_and_counted(family, agent):
    text, _ = text_of_broken_call(family, agent, LOST[family.name])
    said = {"gpt-oss": "to=functions.add", "llama-3": '"add"', "deepseek-v3": "Well.<\uff5ctool"}
    assert said.get(family.name, "Well.") in text


def test_an_unpaired_surrogate_can_be_sent_back(family, agent):
    if not family.carries_broken_json:
        pytest.skip("this format writes strings without JSON")
    agent.script(family.say(None, "", [("write", r'{"text": "\ud800"}')]), family.say(None, "Done.", []))
    choice = agent.ask([USER])
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"text": "\ud800"}
    agent.ask([USER, as_returned(choice.message), result(call)])
    assert [len(segment.turns) for segment in agent.segments()] == [2]


def test_a_call_of_an_unknown_tool_is_returned(family, agent):
    agent.script(family.say(None, "", [("launch", '{"x": 1}')]))
    (call,) = agent.ask([USER]).message.tool_calls
    assert call.function.name == "launch"


def test_the_name_of_a_stop_token_inside_arguments_is_text(family, agent, bundle):
    """The model wrote the end token's name in letters: it ends nothing."""
    name = bundle.decode([bundle.stop_token_ids[0]])
    arguments = json.dumps({"text": f"{name[0]}\u2063{name[1:]}"}, ensure_ascii=False)
    agent.script(family.say(None, "", [("write", arguments)]))
    (call,) = agent.ask([USER]).message.tool_calls
    assert json.loads(call.function.arguments) == json.loads(arguments)


def test_a_stop_token_inside_arguments_ends_the_call(family, agent, bundle):
    name = bundle.decode([bundle.stop_token_ids[0]])
    agent.script(family.say(None, "", [("write", json.dumps({"text": f"ab{name}cd"}, ensure_ascii=False))]))
    choice = agent.ask([USER])
    assert not choice.message.tool_calls
    assert "ab" in choice.message.content
    assert "cd" not in choice.message.content
    assert name not in choice.message.content
    assert agent.malformed() == 1


def test_a_conversation_that_the_template_refuses_is_a_400(family, agent, engine_of):
    """Several calls in one message, sent by the agent itself."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    calls = [call, {**call, "id": "c2"}]
    history = [USER, {"role": "assistant", "content": None, "tool_calls": calls}]
    history += [{"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in calls]
    agent.script(family.say(None, "Done.", []))
    if family.name != "llama-3":
        assert agent.ask(history).message.content == "Done."
        return
    with pytest.raises(openai.BadRequestError, match="single tool call") as refused:
        agent.ask(history)
    assert refused.value.code == "unrenderable"


def test_reasoning_can_be_kept_at_a_new_question(family, engine_of, folder_of, serve, tools):
    """Where the renderer has the option, one conversation stays one sequence."""
    if family.name in CONTINUES_AT_A_QUESTION:
        pytest.skip("continues anyway")
    model = ModelConfig(
        path=folder_of(family),
        renderer=family.renderer,
        renderer_options={"thinking_retention": "all"},
        name="m",
        context_length=8192,
    )
    agent = Agent(serve(engine_of(family).url, model=model, bundle=load_renderer(model)), engine_of(family), tools)
    agent.script(family.say("Easy.", "3", []), family.say("Easy.", "4", []))
    first = agent.ask([USER])
    agent.ask([USER, without_reasoning(first.message), user("And 2 + 2?")])
    assert [len(segment.turns) for segment in agent.segments()] == [2]
