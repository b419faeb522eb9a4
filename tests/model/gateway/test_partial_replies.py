"""An agent that continues only a beginning of a reply is trained on the tokens of that beginning, in one row."""

import json
from itertools import pairwise

import pytest

from agent_wrapper.contract import VersionSpan
from builders import Held, assistant, function_call, function_tool, tool_result, user
from rollout_backend.config import ExpertShape, ModelConfig
from rollout_backend.core.routed_experts import ExpertRows, unpack
from rollout_backend.model.gateway.sessions import conversations
from rollout_backend.model.gateway.sessions import journal as journals
from rollout_backend.model.gateway.sessions.calls import InFlightCall
from rollout_backend.model.gateway.sessions.conversations import Conversations
from rollout_backend.model.model_call import Delta, ModelCall
from rollout_backend.model.rendering.renderer import load_renderer
from rollout_backend.model.rendering.reply import read_tokens
from rollout_backend.model.rendering.segments import Completion
from vocabularies import tokenizer_folder

TOOLS = [function_tool("add", a={"type": "integer"})]
ASK, NEXT, OTHER = user("Look."), user("Next?"), user("Other?")
# After a user's message, this family drops the reasoning of earlier replies.
RESULT = tool_result("c0", "3")
REASONING, CONTENT = "I plan it:\nslowly.", "Dær stays.\n\n```sh\nls  -la\n```\n\nThen <b>words</b>."
CALLS = [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 23}}]
SAMPLED = f"<think>\n{REASONING}\n</think>\n\n{CONTENT}" + "".join(
    f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in CALLS
)
FIRST, SECOND = (function_call("add", json.dumps(call["arguments"]), f"c{i}") for i, call in enumerate(CALLS))
FULL = assistant(CONTENT, reasoning_content=REASONING, tool_calls=[FIRST, SECOND])


@pytest.fixture(scope="module")
def bundle():
    return load_renderer(ModelConfig(path=tokenizer_folder("qwen3"), name="m", renderer="qwen3", context_length=8192))


class Session:
    """A session's conversations, and a second one that gets them from the journal."""

    def __init__(self, bundle, experts: ExpertShape | None = None) -> None:
        self.bundle = bundle
        self.live, self.replayed = Conversations(bundle, experts), Conversations(bundle, experts)

    def completion(self, text: str, end: str = "<|im_end|>", number: float = 0.0) -> Completion:
        ids = tuple(self.bundle.tokenizer.encode(text + end, add_special_tokens=False))
        logprobs = tuple(-(number + i) for i in range(len(ids)))
        half = len(ids) // 2
        spans = VersionSpan(version="1", start=0, end=half), VersionSpan(version="2", start=half, end=len(ids))
        return Completion(ids, logprobs, spans)

    def say(self, messages, text="Done.", reply=None, **more) -> None:
        prompt = self.live.prepare(messages, TOOLS)
        self.replay(self.live.record(prompt, self.completion(text), reply or assistant(text), **more))

    def close(self, messages, text) -> None:
        """Make a call whose client closes the stream after the engine sampled `text`."""
        self.replay(self.live.keep(self.live.prepare(messages, TOOLS), self.completion(text, end="")))

    def replay(self, turn) -> None:
        self.replayed.add(journals.turns({"turns": [journals._turn(turn)]})[0])
        assert self.rows(self.replayed) == self.rows(self.live)

    @staticmethod
    def rows(conversations):
        """Return all of the rows, with NaN as text."""
        return [
            (row.token_ids, row.response_mask, str(row.logprobs), row.turns, row.messages, row.routed_experts)
            for row in conversations.recorder.segments()
        ]

    def trained(self) -> list[list[str]]:
        """Return the text of each turn that is trained, by row."""
        return [
            [self.bundle.decode(row.token_ids[turn.start : turn.end]) for turn in row.turns]
            for row in self.live.recorder.segments()
        ]


def cuts():
    """Yield beginnings of the reply as agents send them back, each with what was sampled of it."""
    before = f"<think>\n{REASONING}\n</think>\n\n"
    for end in range(1, len(CONTENT) + 1):
        text = CONTENT[:end].strip()
        yield assistant(CONTENT[:end]), before + text
        if end % 9 == 0:
            yield assistant(f"  {text}\n\n", reasoning_content=REASONING), before + text
            yield assistant(f"<think>{REASONING}</think>{text}\n"), before + text
            yield assistant(f"{REASONING}\n\n{text}"), before + text
            yield assistant(f"{REASONING}\n</think>\n{text}"), before + text
    for end in range(3, len(REASONING), 5):
        yield assistant("", reasoning_content=REASONING[:end]), f"<think>\n{REASONING[:end].strip()}"
        yield assistant(f"<think>\n{REASONING[:end]}"), f"<think>\n{REASONING[:end].strip()}"
    yield assistant(CONTENT, tool_calls=[FIRST]), SAMPLED.partition("23")[0].rpartition("\n<tool_call>")[0]


@pytest.mark.parametrize("closes", [False, True])
def test_the_row_ends_at_the_token_that_completes_what_came_back(bundle, closes):
    for back, sampled in cuts():
        session = Session(bundle)
        (session.close if closes else session.say)([ASK], SAMPLED, *(() if closes else (FULL,)))
        answers = [tool_result(call["id"], "3") for call in back.get("tool_calls", ())] or [RESULT]
        session.say([ASK, back, *answers])
        [row] = session.live.recorder.segments()
        [(cut, done)] = session.trained()
        assert cut.startswith(sampled), back
        if "tool_calls" not in back:
            blanks = len(back["content"]) - len(back["content"].rstrip())
            before_last = bundle.decode(bundle.tokenizer.encode(cut, add_special_tokens=False)[:-1])
            assert len(before_last) < len(sampled) + blanks, back
        assert done == "Done.<|im_end|>"
        turn = row.turns[0]
        whole = session.completion(SAMPLED)
        assert tuple(row.token_ids[turn.start : turn.end]) == whole.token_ids[: turn.end - turn.start]
        assert [*row.logprobs[turn.start : turn.end]] == [*whole.logprobs[: turn.end - turn.start]]
        assert (turn.weight_versions[0].start, turn.weight_versions[-1].end) == (turn.start, turn.end)
        assert all(one.end == two.start for one, two in pairwise(turn.weight_versions))
        assert session.live.closed == 0


@pytest.mark.parametrize(
    "back",
    [
        assistant("", tool_calls=[FIRST, SECOND]),
        assistant(CONTENT, tool_calls=[SECOND]),
        assistant(CONTENT, tool_calls=[function_call("add", '{"a": 1, "b": 2}', "c0")]),
        assistant(CONTENT[:20] + " [cut]"),
        assistant(CONTENT[5:30]),
        assistant(CONTENT[:20], tool_calls=[FIRST]),
        assistant(""),
    ],
    ids=["no text", "second call", "more arguments", "other end", "middle", "less text", "nothing"],
)
def test_what_is_no_beginning_opens_a_row(bundle, back):
    session = Session(bundle)
    session.say([ASK], SAMPLED, FULL)
    session.close([ASK], SAMPLED)
    session.say([ASK, back, NEXT])
    assert session.trained() == [[SAMPLED + "<|im_end|>"], ["Done.<|im_end|>"]]
    assert session.live.closed == 1


def test_a_reply_is_compared_once_with_what_replaced_it(bundle, monkeypatch):
    """An agent keeps only its own words for each reply, and shows all of them in each call."""
    session, reads, history = Session(bundle), [], [ASK]
    where = "rollout_backend.model.gateway.sessions.conversations.read_tokens"
    monkeypatch.setattr(where, lambda *args: (reads.append(0), read_tokens(*args))[1])
    for number in range(30):
        session.live.record(session.live.prepare(history, TOOLS), session.completion(SAMPLED), FULL)
        history = [*history, assistant(f"summary {number}"), NEXT]
    assert len(session.live.recorder.segments()) == 30
    assert 0 < len(reads) <= 2 * 30


@pytest.mark.parametrize("closes", [False, True])
def test_several_cuts_in_a_row_are_one_row(bundle, closes):
    session, messages = Session(bundle), [ASK]
    for _ in range(3):
        if closes:
            session.close([*messages], "One two. Three")
        else:
            session.say([*messages], "One two. Three")
        messages += [assistant("One two."), NEXT]
    session.say([*messages])
    assert session.trained() == [["One two.", "One two.", "One two.", "Done.<|im_end|>"]]


def test_each_token_is_trained_once_if_branches_continue_different_parts(bundle):
    whole, part, less = assistant("One two three."), assistant("One two"), assistant("One")
    branches = {"whole": [ASK, whole, OTHER], "part": [ASK, part, NEXT], "less": [ASK, less, NEXT]}
    expected = {
        ("part", "whole"): [["One two", "Done.<|im_end|>"], [" three.<|im_end|>", "Done.<|im_end|>"]],
        ("whole", "part"): [["One two three.<|im_end|>", "Done.<|im_end|>"], ["Done.<|im_end|>"]],
        ("less", "part"): [["One", "Done.<|im_end|>"], [" two", "Done.<|im_end|>"]],
    }
    for (first, then), rows in expected.items():
        session = Session(bundle)
        session.say([ASK], "One two three.")
        session.say(branches[first])
        session.say(branches[then])
        assert session.trained() == rows, (first, then)
        ends = [bundle.decode(row.token_ids) for row in session.live.recorder.segments()]
        assert all("<|im_end|>\n<|im_start|>user\n" in end for end in ends)


def test_a_reply_that_is_left_out_stays_so_whatever_is_continued(bundle):
    session = Session(bundle)
    session.say([ASK], "One two three.", left_out=True)
    session.say([ASK, assistant("One two"), NEXT])
    session.say([ASK, assistant("One two three."), OTHER])
    for each in (session.live, session.replayed):
        each.leave_out()
    assert session.trained() == [["Done.<|im_end|>"], ["Done.<|im_end|>"]]
    assert session.rows(session.live) == session.rows(session.replayed)


def test_routing_is_kept_for_a_row_with_a_cut(bundle):
    shape = ExpertShape(layers=1, topk=1, experts=300000)
    for closes in (False, True):
        session = Session(bundle, shape)

        def call(messages, closed=False, session=session):
            prompt = session.live.prepare(messages, TOOLS)
            done = session.completion("One two. Three", "" if closed else "<|im_end|>")
            if closed:
                return session.replay(session.live.keep(prompt, done))
            start = max(prompt.known - 1, 0)
            tokens = [*prompt.ids, *done.token_ids][start:-1]
            rows = ExpertRows(start, b"".join((token % 60000).to_bytes(2, "little") for token in tokens))
            done = Completion(done.token_ids, done.logprobs, done.weight_versions, experts=rows)
            return session.replay(session.live.record(prompt, done, assistant("One two. Three")))

        call([ASK], closed=closes)
        call([ASK, assistant("One two."), NEXT])
        call([ASK, assistant("One two."), NEXT, assistant("One two. Three"), NEXT])
        [row] = session.live.recorder.segments()
        assert row.routed_experts is not None
        assert unpack(row.routed_experts).ravel().tolist() == [token % 60000 for token in row.token_ids[:-1]]


# --- through the gateway ------------------------------------------------------------------------------------------

ACT, TAIL = "I look.\n```sh\nls\n```", "\nThen I wait."


def bodies(api: str, back: str | None) -> tuple[str, dict]:
    """Return the path and body of the first call of an API, or of the one that continues `back`."""
    said = [] if back is None else [assistant(back), NEXT]
    if api == "completions":
        prompt = "Q: look\nA:" + ("" if back is None else f"{back}\nQ: done?\nA:")
        return "/v1/completions", {"prompt": prompt, "max_tokens": 100}
    if api == "responses":
        items = [{"role": m["role"], "content": m["content"]} for m in [ASK, *said]]
        return "/v1/responses", {"input": items, "store": False}
    if api == "messages":
        return "/v1/messages", {"messages": [ASK, *said], "max_tokens": 100}
    return "/v1/chat/completions", {"messages": [ASK, *said]}


@pytest.mark.parametrize("how", ["closed", "drained", "whole"])
@pytest.mark.parametrize("api", ["chat", "responses", "messages", "completions"])
def test_an_agent_that_cuts_its_reply_is_trained_on_what_it_acted_on(play, api, how):
    held = Held()
    script = lambda prompt: "Done." if "Next?" in prompt or "done?" in prompt else first  # noqa: E731
    first = held.pieces(ACT, TAIL) if how == "closed" and api != "completions" else ACT + TAIL
    gateway = play(script)
    path, body = bodies(api, None)
    if how == "whole":
        gateway.post({"model": "scripted", **body}, path=path)
    else:
        with gateway.stream({"model": "scripted", **body}, path=path) as answer:
            read = ""
            for line in answer.iter_lines():
                read += line
                if how == "closed" and "ls" in read and '```"' in read.replace("\\n", ""):
                    break
    path, body = bodies(api, ACT)
    gateway.post({"model": "scripted", **body}, path=path)
    held.go.set()
    [row] = gateway.trajectory().segments
    texts = [gateway.engine.tokenizer.decode(row.token_ids[turn.start : turn.end]) for turn in row.turns]
    assert [texts[0].rstrip(), texts[1][:5]] == [ACT, "Done."]
    assert gateway.stats().undelivered == 0


def test_a_call_waits_for_the_end_of_the_stream_that_it_continues(play, in_thread):
    held = Held()
    gateway = play(lambda prompt: "Done." if "Next?" in prompt else held.pieces(ACT, TAIL))
    with gateway.stream({"model": "scripted", "messages": [ASK]}) as answer:
        lines = answer.iter_lines()
        while "```" not in next(lines).rpartition("ls")[2]:
            pass
        body = {"model": "scripted", "messages": [ASK, assistant(ACT), NEXT]}
        then = in_thread(gateway.post, body)
        with pytest.raises(TimeoutError):
            then.result(timeout=0.2)
        held.go.set()
        then.result(timeout=60)
        list(lines)
    [row] = gateway.trajectory().segments
    assert len(row.turns) == 2


class Counted(str):
    """A text that counts the characters to which it is added."""

    characters = 0

    def __radd__(self, text):
        Counted.characters += len(text)
        return text + str(self)


def test_what_a_client_may_have_read_is_put_together_in_linear_time():
    call = InFlightCall(ModelCall("", (), n=2))
    call.deltas = [Delta(kind, Counted("ab"), choice=i % 2) for i in range(1000) for kind in ("reasoning", "text")]
    assert call.said() == [assistant("ab" * 500, reasoning_content="ab" * 500)] * 2
    assert Counted.characters <= 4000


def test_a_closed_stream_that_no_call_continues_is_counted_and_not_trained(play):
    held = Held()
    gateway = play(lambda prompt: "Done." if "Other" in prompt else held.pieces(ACT, TAIL))
    with gateway.stream({"model": "scripted", "messages": [ASK]}) as answer:
        next(line for line in answer.iter_lines() if "```" in line)
    gateway.post({"model": "scripted", "messages": [OTHER]})
    [row] = gateway.trajectory().segments
    held.go.set()
    assert len(row.turns) == 1
    assert gateway.stats().undelivered == 1


def test_a_message_is_compared_with_a_limited_number_of_tokens(bundle, monkeypatch):
    read = []

    def counted(*args):
        read.append(len(args[3].token_ids))
        return read_tokens(*args)

    monkeypatch.setattr(conversations, "read_tokens", counted)
    monkeypatch.setattr(conversations, "_COMPARED_TOKENS", 1000)
    session = Session(bundle)
    for _ in range(20):
        session.say([ASK], SAMPLED, FULL)
    # It begins like each of the replies, and is the beginning of none.
    session.live.prepare([ASK, assistant(CONTENT[:3], tool_calls=[FIRST]), RESULT], TOOLS)
    assert 1000 < sum(read) < 4000
