"""How conversations become segments: which calls continue one, and why others open another.

The model is byte-level: a reply of n ASCII letters is n tokens and its end token, n + 1.
"""

import copy
import random
from collections import Counter

import pytest

from builders import assistant, function_call, function_tool, system, tool_result, user
from rollout_backend.model.gateway.sessions.conversations import Conversations, PrefixMemo, RecordedReply
from rollout_backend.model.rendering.renderer import load_renderer
from rollout_backend.model.rendering.segments import Completion

U1, U2, U3 = (user(f"question {n}") for n in (1, 2, 3))
A, EDITED = assistant("A"), assistant("edited")
SYSTEM = system("Be brief.")
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = function_call("f", '{"a": 1, "b": 2}')
FIRST, ANOTHER, BRANCHED, REWRITTEN = "first_call", "new_conversation", "branched", "history_rewritten"


@pytest.fixture
def session(bundle) -> Conversations:
    return Conversations(bundle)


@pytest.fixture
def say(bundle):
    """Make one call: the model samples `text`, and the agent gets `reply`. Return why a segment was opened."""

    def call(session, messages, text="A", tools=None, **reply):
        prompt = session.prepare(messages, tools)
        ids = bundle.tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
        completion = Completion(tuple(ids), (None,) * len(ids))
        return session.record(prompt, completion, {"role": "assistant", "content": text, **reply}).opened

    return call


def test_a_reply_that_another_row_continues_is_not_dropped(session, say):
    say(session, [U1])
    (reply,) = (RecordedReply(place, end) for (_, end, _), place in session._turns.items())
    assert say(session, [U1, A, U2], tools=TOOLS) == "tools_changed"
    assert session.drop([reply]) == []
    assert len(session.recorder.segments()) == 2


def test_the_sampled_tokens_are_kept_even_if_the_reply_renders_differently(session, say, bundle):
    say(session, [U1], text="  A <|endoftext|>", content="A")
    prompt = session.prepare([U1, A, U2], None)
    assert "  A <|endoftext|><|im_end|>" in bundle.decode(prompt.ids)


@pytest.mark.parametrize(
    ("sampled", "echoed", "same"),  # each a text and its reasoning
    [
        ((None, "hm\n"), ("hm", "hm"), True),
        ((None, "hm\n"), ("other", "hm"), False),
        (("hm", ""), ("", "hm"), False),
        ((None, "hm"), ("", None), True),
        (("hm", "hm"), ("hm", None), True),
    ],
)
def test_reasoning_beside_a_call_may_be_repeated_as_text_or_left_out(session, say, sampled, echoed, same):
    say(session, [U1], content=sampled[0], tool_calls=[CALL], reasoning_content=sampled[1])
    more = {} if echoed[1] is None else {"reasoning_content": echoed[1]}
    again = [U1, assistant(echoed[0], tool_calls=[CALL], **more), tool_result("c1", "3")]
    assert say(session, again) == (None if same else REWRITTEN)


def with_another_id(text: str) -> list[dict]:
    call = {**CALL, "id": "chosen_by_the_agent"}
    return [assistant("", tool_calls=[call]), tool_result(call["id"], text)]


def test_the_work_grows_with_the_messages_and_not_with_their_square(session):
    read = Counter()

    class Read(dict):
        def get(self, *args):
            read.update(args[:1])
            return super().get(*args)

    session.question([Read(role="tool", content="", tool_call_id=f"c{i}") for i in range(1000)], None)
    assert max(read.values()) < 10_000


def test_a_changed_call_id_matters_only_if_ids_are_rendered(session, say, bundle, monkeypatch):
    assert not bundle.renders_call_ids
    say(session, [U1], tools=TOOLS, content=None, tool_calls=[CALL])
    assert say(session, [U1, *with_another_id("3")], tools=TOOLS) is None
    assert say(session, [U1, *with_another_id("4")], tools=TOOLS) == BRANCHED
    monkeypatch.setitem(vars(bundle), "renders_call_ids", True)
    session = Conversations(bundle)
    say(session, [U1], tools=TOOLS, content=None, tool_calls=[CALL])
    assert say(session, [U1, *with_another_id("3")], tools=TOOLS) == REWRITTEN


def test_exchanged_results_of_two_calls_are_a_rewritten_history(session, say):
    f, g = CALL, function_call("g", '{"a": 1, "b": 2}', "c2")
    called = assistant("", tool_calls=[f, g])
    results = [tool_result(n, "3") for n in ("c1", "c2")]
    say(session, [U1], tools=TOOLS, content=None, tool_calls=[f, g])
    say(session, [U1, called, *results], tools=TOOLS)
    assert say(session, [U1, called, *results, A, U2], tools=TOOLS) is None
    assert say(session, [U1, called, *reversed(results), A, U2], tools=TOOLS) == REWRITTEN


DEFAULTS = {"a": {"default": 1}, "b": {}, "c": {"default": False}, "d": {"default": [1]}, "e": True}


@pytest.mark.parametrize(
    ("sampled", "echoed", "same"),
    [
        # Command-line agents fill in a tool's defaults when they validate a call's arguments.
        ('{"b": 2}', '{"a": 1, "b": 2, "c": false, "d": [1]}', True),
        ('{"a": 1, "b": 2}', '{"b": 2}', True),
        ('{"b": 2}', '{"b": 2, "c": 0}', False),
        ('{"b": 2}', '{"b": 2, "e": 1}', False),
        ('{"b": 2}', "[1]", False),
        ('{"b": ', '{"b": ', True),
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}', True),
        # JavaScript has one kind of number, and iterates keys that look like integers first.
        ('{"x": 1.0, "y": [1e3]}', '{"y":[1000],"x":1}', True),
        ('{"x": -0.0}', '{"x": 0}', True),
        ('{"t": {"b": 1, "10": 2, "9": 3}}', '{"t":{"9":3,"10":2,"b":1}}', True),
        ('{"x": NaN}', '{"x": null}', False),
        ('{"x": 1}', '{"x": "1"}', False),
        ('{"x": 1}', '{"x": true}', False),
        ('{"x": 0.1}', '{"x": 0.11}', False),
    ],
)
def test_arguments_with_equal_values_or_a_tools_defaults_are_the_same_call(session, say, sampled, echoed, same):
    tools = [function_tool("f", **DEFAULTS)]
    say(session, [U1], tools=tools, content=None, tool_calls=[function_call("f", sampled)])
    again = [U1, assistant("", tool_calls=[function_call("f", echoed)]), tool_result("c1", "3")]
    assert say(session, again, tools=tools) == (None if same else REWRITTEN)


@pytest.mark.parametrize(("sampled", "echoed"), [(" Hi.\n", "Hi."), (" \n", ""), ("Hi.", "Hi. ")])
def test_a_reply_without_the_whitespace_at_its_ends_is_the_same(session, say, sampled, echoed):
    say(session, [U1], content=sampled)
    assert say(session, [U1, assistant(echoed), U2]) is None


@pytest.mark.parametrize(
    ("messages", "tools", "reason"),
    [
        ([U1], None, BRANCHED),
        ([U1, A, U2], None, BRANCHED),
        ([U1, EDITED, U2], None, REWRITTEN),
        ([U1, A, U2, EDITED, U3], None, REWRITTEN),
        ([U1, U2], None, REWRITTEN),
        ([U2], None, ANOTHER),
        ([SYSTEM, U1], None, ANOTHER),
        ([U1, A, U2], TOOLS, "tools_changed"),
    ],
)
def test_a_call_that_continues_nothing_opens_a_segment_that_says_why(session, say, messages, tools, reason):
    say(session, [U1])
    say(session, [U1, A, U2])
    assert say(session, messages, tools=tools) == reason


def test_a_shared_system_message_does_not_make_a_shared_conversation(session, say):
    say(session, [SYSTEM, U1])
    assert say(session, [SYSTEM, U2]) == ANOTHER


@pytest.mark.parametrize(
    ("id", "reasoning", "turns"), [("c1", "so", [2, 1]), ("x", "hm", [2, 1]), ("x", "", [1, 2]), ("c2", "hm", [1, 2])]
)
def test_of_equal_replies_that_with_the_call_ids_or_reasoning_or_the_last_is_continued(
    session, say, id, reasoning, turns
):
    say(session, [U1], text="AA", content=None, tool_calls=[CALL], reasoning_content="hm\n")
    say(session, [U1], text="B", content=None, tool_calls=[{**CALL, "id": "c2"}], reasoning_content="so")
    echoed = assistant("", tool_calls=[{**CALL, "id": id}], reasoning_content=reasoning)
    assert say(session, [U1, echoed, tool_result(id, "3")]) is None
    assert [len(segment.turns) for segment in session.recorder.segments()] == turns


def test_without_a_bridge_a_turn_is_rendered_again_and_its_tokens_are_compared(byte_model, say):
    bundle = load_renderer(byte_model.model_copy(update={"renderer": "default"}))
    session = Conversations(bundle)
    assert say(session, [U1], text="A ") == FIRST
    assert say(session, [U1, assistant("A "), U2]) is None  # this template happens to give the same tokens
    assert len(session.recorder.segments()) == 1
    session = Conversations(bundle)
    say(session, [U1], text="A<|endoftext|>", content="A")
    assert say(session, [U1, A, U2]) == "rerendered"


# --- the digests of a conversation ---------------------------------------------------------------------------


class Steps:
    """Digest messages as a memo's caller does, and count how many."""

    def __init__(self) -> None:
        self.taken = 0

    def __call__(self, before, messages, i):
        self.taken += 1
        return before + repr(messages[i]["content"]).encode()


def texts_of(*texts: str) -> list[dict]:
    return [{"role": "user", "content": text} for text in texts]


def test_only_new_messages_are_digested():
    memo, steps = PrefixMemo(), Steps()
    assert memo.chain(texts_of("a", "b"), steps) == [b"'a'", b"'a''b'"]
    assert memo.chain(texts_of("a", "b", "c"), steps) == [b"'a'", b"'a''b'", b"'a''b''c'"]
    assert steps.taken == 3


def test_digests_of_another_context_are_not_reused():
    memo, steps = PrefixMemo(), Steps()
    memo.chain(texts_of("a"), steps, context=b"tools")
    memo.chain(texts_of("a"), steps, context=b"other tools")
    assert steps.taken == 2


def test_a_list_that_its_owner_extends_later_changes_nothing():
    memo, messages = PrefixMemo(), texts_of("a")
    memo.chain(messages, Steps())
    messages += texts_of("b")
    assert memo.chain(messages, Steps()) == [b"'a'", b"'a''b'"]


def test_alternating_conversations_give_the_digests_of_a_new_memo():
    numbers, memo = random.Random(3), PrefixMemo()
    conversations = [texts_of("system")]
    for _ in range(300):
        conversation = copy.deepcopy(numbers.choice(conversations))
        if numbers.random() < 0.2:
            conversation[numbers.randrange(len(conversation))]["content"] = "changed"
        del conversation[numbers.randint(1, len(conversation)) :]
        conversation += texts_of(*(numbers.choice("xyz") for _ in range(numbers.randint(0, 3))))
        conversations = [*conversations[-5:], conversation]
        assert memo.chain(conversation, Steps()) == PrefixMemo().chain(conversation, Steps())
