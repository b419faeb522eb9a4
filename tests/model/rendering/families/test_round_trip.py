"""Tool calls and reasoning of each family: sampled, parsed, sent back as agents do, and continued."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from builders import tool_result, user
from gateway_fixtures import make_gateway
from gateway_server import GatewayServer
from rollout_backend.config import ModelConfig
from rollout_backend.model.rendering.renderer import load_renderer
from rollout_backend.workbench.local.scripted import ScriptedEngine
from vocabularies import tokenizer_folder

USER = user("What is 1 + 2?")
# The others drop earlier reasoning at a new question, so what follows is another sequence of tokens.
CONTINUES_AT_A_QUESTION = ("llama-3", "deepseek-v3")


class Agent:
    """Call a gateway without keeping a history: each test says what it sends back."""

    def __init__(self, gateway: GatewayServer, tools: Any) -> None:
        self._gateway, self._tools = gateway, tools

    def ask(self, *messages, **more):
        completions = self._gateway.client().chat.completions
        return completions.create(model="m", messages=[USER, *messages], tools=self._tools, **more).choices[0]

    def turns(self) -> list[int]:
        """Return the number of turns of each row."""
        return [len(segment.turns) for segment in self._gateway.trajectory().segments]

    def malformed(self) -> int:
        return self._gateway.stats().malformed_tool_calls


def gateway_of(family, bundle, engine: ScriptedEngine, **options):
    model = ModelConfig(
        path=tokenizer_folder(family.tokenizer), renderer=family.name, name="m", context_length=8192, **options
    )
    return make_gateway(engine.url, model, bundle or load_renderer(model), engine=engine)


@pytest.fixture(scope="module")
def shared(family, bundle):
    with (
        ScriptedEngine((), tokenizer_folder(family.tokenizer), end=None) as engine,
        gateway_of(family, bundle, engine) as gateway,
    ):
        yield gateway


@pytest.fixture
def start(shared, tools) -> Callable[..., Agent]:
    """Return an agent whose model gives these replies."""
    with ExitStack() as stack:

        def start(*replies: str) -> Agent:
            view = shared.view(replies)
            stack.callback(view.close)
            return Agent(view, tools)

        yield start


def as_returned(message) -> dict[str, Any]:
    return message.model_dump(exclude_none=True)


def without_reasoning(message) -> dict[str, Any]:
    return {"content": None, **message.model_dump(include={"role", "content", "tool_calls"})}


def respaced(message) -> dict[str, Any]:
    sent = as_returned(message)
    for call in sent["tool_calls"]:
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
    return sent


@pytest.mark.parametrize("send", [as_returned, without_reasoning, respaced])
def test_a_tool_conversation_is_one_sequence(family, start, send):
    thought = "One and two." if family.reasons else None
    agent = start(family.say(thought, "", [("add", '{"a": 1, "b": 2}')]), family.say(thought, "It is 3.", []))
    called = agent.ask()
    assert called.finish_reason == "tool_calls"
    assert getattr(called.message, "reasoning_content", None) == thought
    (call,) = called.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    answer = agent.ask(send(called.message), tool_result(call.id, "3"))
    assert (answer.finish_reason, answer.message.content) == ("stop", "It is 3.")
    assert not answer.message.tool_calls
    assert agent.turns() == [2]
    assert agent.malformed() == 0


def test_several_calls_in_one_reply(family, start):
    if not family.parallel:
        pytest.skip("one call is all that this format has in a turn")
    calls = [("add", '{"a": 1, "b": 2}'), ("write", '{"text": "x"}')]
    agent = start(family.say(None, "Both.", calls), family.say(None, "Done.", []))
    message = agent.ask().message
    found = message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in found] == [
        (name, json.loads(arguments)) for name, arguments in calls
    ]
    assert len({call.id for call in found}) == 2
    assert message.content == "Both."
    agent.ask(as_returned(message), *(tool_result(call.id, "3") for call in found))
    assert agent.turns() == [2]


NESTED = {"text": 'Grüße "日本" 🙂\n\ttab \\ back', "options": {"a": [1, {"b": None}], "c": {"d": True}}}


@pytest.mark.parametrize("case", ["nested", "a surrogate", "the name of a stop token"])
def test_arguments_are_parsed_and_can_be_sent_back(family, bundle, start, case):
    end = bundle.decode([bundle.stop_token_ids[0]])
    arguments = {
        "nested": json.dumps(NESTED, ensure_ascii=False),
        "a surrogate": r'{"text": "\ud800"}',
        "the name of a stop token": f'{{"text": "{end[0]}\u2063{end[1:]}"}}',  # in letters: it ends nothing
    }[case]
    if case == "a surrogate" and not family.is_json:
        pytest.skip("this format writes strings without JSON")
    agent = start(family.say(None, "", [("write", arguments)]), family.say(None, "Done.", []))
    message = agent.ask().message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == json.loads(arguments)
    agent.ask(as_returned(message), tool_result(call.id, "3"))
    assert agent.turns() == [2]


def test_a_new_question_continues_the_segment_where_the_template_allows(family, start):
    thought = "Easy." if family.reasons else None
    agent = start(family.say(thought, "3", []), family.say(thought, "4", []))
    agent.ask(as_returned(agent.ask().message), user("And 2 + 2?"))
    assert agent.turns() == ([2] if family.name in CONTINUES_AT_A_QUESTION else [1, 1])


def test_reasoning_can_be_kept_at_a_new_question(family, shared, tools):
    """Where the renderer has the option, one conversation stays one sequence."""
    if family.name in CONTINUES_AT_A_QUESTION:
        pytest.skip("continues anyway")
    shared.engine.replies = [family.say("Easy.", "3", []), family.say("Easy.", "4", [])]
    with gateway_of(family, None, shared.engine, renderer_options={"thinking_retention": "all"}) as gateway:
        agent = Agent(gateway, tools)
        agent.ask(without_reasoning(agent.ask().message), user("And 2 + 2?"))
        assert agent.turns() == [2]


def test_reasoning_cut_by_the_limit(family, start):
    if not family.reasons:
        pytest.skip("a family without reasoning")
    agent = start(family.say("A long thought " * 20, "never said", []), family.say("x", "Done.", []))
    choice = agent.ask(max_completion_tokens=12)
    assert (choice.finish_reason, choice.message.content) == ("length", "")
    assert choice.message.reasoning_content.lstrip().startswith("A long thought")
    assert agent.ask(as_returned(choice.message), user("And?")).message.content == "Done."


def text_of_broken_call(family, start, said: str, **more) -> tuple[str, str]:
    """Sample `said`. Check that it is no call, is counted, and can be continued; return its text and why it ended."""
    agent = start(said, family.say("x", "Done.", []))
    choice = agent.ask(**more)
    assert not choice.message.tool_calls
    assert agent.malformed() == 1
    assert agent.ask(as_returned(choice.message), user("That was no call.")).message.content == "Done."
    return choice.message.content, choice.finish_reason


def test_a_call_cut_by_the_limit_is_text(family, start):
    said = family.say(None, "", [("write", json.dumps({"text": "word " * 60}))])
    text, finish = text_of_broken_call(family, start, said, max_completion_tokens=50)
    assert finish == "length"
    assert "word word" in text


@pytest.mark.parametrize(
    "arguments",
    ['{"a": 1,}', '{"a": "x', "[1, 2]", '"text"', '{"a": NaN}', '{"a": ' * 1500 + "1" + "}" * 1500],
    ids=["comma", "open", "list", "string", "nan", "deep"],
)
def test_broken_arguments_are_text_and_counted(family, start, arguments):
    if not family.is_json:
        pytest.skip("this format writes arguments without JSON around them")
    text, finish = text_of_broken_call(family, start, family.say(None, "", [("add", arguments)]))
    assert finish == "stop"
    assert arguments[:5] in text


# Text that each family's parser drops, or returns as plain content.
LOST = {
    "qwen3": "Well.\n<tool_call>\n",
    "gpt-oss": ' to=functions.add<|channel|>commentary json{"a": 1}<|call|>',
    "llama-3": "<|python_tag|>add.call(a=1)<|eom_id|>",
    "glm-5": "Hm.</think>Well.<tool_call>",
    "deepseek-v3": "Well.<\uff5ctool\u2581calls\u2581begin\uff5c>add it<\uff5cend\u2581of\u2581sentence\uff5c>",
}


def test_an_incomplete_call_is_returned_as_text_and_counted(family, start):
    text, _ = text_of_broken_call(family, start, LOST[family.name])
    said = {"gpt-oss": "to=functions.add", "llama-3": "add.call", "deepseek-v3": "Well.<\uff5ctool"}
    assert said.get(family.name, "Well.") in text


def test_a_stop_token_inside_arguments_ends_the_call(family, bundle, start):
    name = bundle.decode([bundle.stop_token_ids[0]])
    agent = start(family.say(None, "", [("write", json.dumps({"text": f"ab{name}cd"}, ensure_ascii=False))]))
    message = agent.ask().message
    assert not message.tool_calls
    assert "ab" in message.content
    assert "cd" not in message.content
    assert name not in message.content
    assert agent.malformed() == 1
