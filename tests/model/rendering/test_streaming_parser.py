"""Replies cut into pieces at random, for renderers with different formats on one byte-level vocabulary."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from builders import function_tool
from rollout_backend.config import ModelConfig
from rollout_backend.model.model_call import Choice, Delta, ModelCall
from rollout_backend.model.rendering.renderer import load_renderer
from rollout_backend.model.rendering.reply import StreamingParser, read_reply
from rollout_backend.model.rendering.segments import Completion
from rollout_backend.model.rendering.token_bytes import ClearTokens, StopStrings
from vocabularies import byte_vocabulary, model_folder

TOOLS = [function_tool("f", a={"type": "integer"})]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
GLM_CALL = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
SEED_CALL = "<seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>"
OTHERS = {  # rendered with their own templates
    "seed-oss": ("<seed:think>", "</seed:think>", SEED_CALL),
    "mistral": ("[THINK]", "[/THINK]", '[TOOL_CALLS]f[ARGS]{"a": 1}'),
    "nemotron-nano-v2": ("<think>", "</think>", '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>'),
    "olmo3": ("<think>", "</think>", "<function_calls>\nf(a=1)\n</function_calls>"),
}
CALLS = {"chatml": CALL, "qwen3": CALL, "qwen3.5": XML_CALL, "nemotron-3": XML_CALL, "glm-4.5": GLM_CALL}


@pytest.fixture(scope="module", params=[*CALLS, *OTHERS])
def any_bundle(request, bundle, tmp_path_factory):
    """Renderers with different formats, on the byte model with the tokens that they need."""
    if request.param == "chatml":
        return bundle
    path = byte_vocabulary(tmp_path_factory.mktemp("model"))
    if request.param not in OTHERS:
        return load_renderer(ModelConfig(path=path, renderer=request.param))
    folder = model_folder(tmp_path_factory.mktemp("own") / request.param, path, OTHERS[request.param][0])
    options = {"tool_parser": request.param}
    return load_renderer(ModelConfig(path=folder, renderer="default", renderer_options=options))


def format_of(bundle) -> tuple[str, str, str]:
    """Return the markers of reasoning and a call in the format of a renderer."""
    name = getattr(bundle.renderer.inner.config, "tool_parser", None) or bundle.name
    return OTHERS[name] if name in OTHERS else ("<think>", "</think>", CALLS[name])


def feed(parser: StreamingParser, ids) -> list[Delta]:
    """Return the deltas that the gateway sends after these ids."""
    deltas = parser.add(ids)
    return parser.parse() if parser.tokens_to_parse else deltas


class Streamed:
    """A reply as a whole, and the parts of it that were streamed."""

    def __init__(self, bundle, ids, sizes, *, tools=TOOLS, stop=(), parallel=True) -> None:
        stops = StopStrings(stop, bundle.token_bytes)
        found = stops.find(ids)
        ids = ids[: found.tokens] if found else ids
        call = ModelCall("m", [], tools=tools, parallel_tool_calls=parallel)
        increments = StreamingParser(bundle, [1, 2], call)
        self.early: list[Delta] = []
        clears = ClearTokens(stops)
        at, fed, sizes = 0, 0, list(sizes) or [1]
        while (at := at + sizes[0]) < len(ids):
            sizes = [*sizes[1:], sizes[0]]
            clear = clears.count(ids[:at])
            self.early += feed(increments, ids[fed:clear])
            fed = clear
        parsed = bundle.renderer.parse_response(list(ids), tools=tools, prompt_ids=[1, 2])
        completion = Completion(tuple(ids), (), matched=found.string if found else None)
        self.whole: Choice = read_reply(parsed, bundle.decode(ids), call, completion)
        late, self.reply = increments.end(self.whole)
        self.deltas = [*self.early, *late]

    def text(self, kind: str, early: bool = False) -> str:
        return "".join(delta.text for delta in (self.early if early else self.deltas) if delta.kind == kind)

    def calls(self) -> list:
        return [delta.tool_call for delta in self.deltas if delta.kind == "tool_call"]

    def check(self) -> None:
        """Check that the streamed parts are the recorded reply."""
        message = self.reply.message
        assert self.text("text") == (message["content"] or "")
        assert self.text("reasoning") == message.get("reasoning_content", "")
        assert self.calls() == message.get("tool_calls", [])


def without_ids(message: dict) -> dict:
    plain = json.loads(json.dumps(message))
    for call in plain.get("tool_calls", ()):
        del call["id"]
    if isinstance(plain.get("content"), str):
        plain["content"] = plain["content"].lstrip()  # some parsers drop it once more follows, after it was sent
    return plain


pieces = st.sampled_from(
    (
        *("<think>", "</think>", "<tool_call>", "</tool_call>", CALL, XML_CALL, GLM_CALL, "<tool", "_call>"),
        *(piece for others in OTHERS.values() for piece in others),
        *("hello ", "w\n", " ", "\n\n", "é€😀", "<", "</", "STOP", "ST", '{"name": "f"}', "zq", "not a call"),
    )
)
texts = st.lists(pieces, max_size=9).map("".join)
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@given(
    text=texts,
    junk=st.lists(st.integers(3, 258), max_size=3),
    cut=st.integers(0, 400),
    sizes=sizes,
    tools=st.sampled_from([TOOLS, None]),
    stop=st.sampled_from([(), ("STOP",), ("T", " w")]),
    parallel=st.booleans(),
)
def test_any_cut_of_a_reply_gives_the_same_message(bundle, text, junk, cut, sizes, tools, stop, parallel):
    ids = [*bundle.tokenizer.encode(text, add_special_tokens=False)[:cut], *junk]
    streamed = Streamed(bundle, ids, sizes, tools=tools, stop=stop, parallel=parallel)
    streamed.check()
    assert without_ids(streamed.reply.message) == without_ids(streamed.whole.message)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts, junk=st.lists(st.integers(3, 258), max_size=3), sizes=sizes)
@example(text="<think><tool_call>", junk=[], sizes=[1])
def test_the_streamed_parts_are_the_recorded_reply_in_every_format(any_bundle, text, junk, sizes):
    ids = [*any_bundle.tokenizer.encode(text, add_special_tokens=False), *junk]
    streamed = Streamed(any_bundle, ids, sizes)
    streamed.check()
    assert len(streamed.calls()) == len(streamed.whole.message.get("tool_calls", []))


@pytest.mark.parametrize("size", [1, 17])
@pytest.mark.parametrize("thinks", [False, True])
def test_a_reply_is_streamed_while_it_is_sampled(any_bundle, thinks, size):
    begin, end, call = format_of(any_bundle)
    thinks = thinks and any_bundle.name != "chatml"
    reasoning = f"{begin}\nLet me see: 1 < 2.\n{end}\n\n" if thinks else ""
    text = f"{reasoning}I add é € twice.\n{call}\n{call}"
    ids = any_bundle.tokenizer.encode(text, add_special_tokens=False)
    streamed = Streamed(any_bundle, ids, [size])
    streamed.check()
    said = [streamed.text(kind, early=True).strip() for kind in ("reasoning", "text")]
    if any_bundle.name == "glm-4.5" and not thinks:  # its parser takes such a text for unmarked reasoning
        said = ["", streamed.text("reasoning").strip()]
    assert said == ["Let me see: 1 < 2." if thinks else "", "I add é € twice."]
    assert [json.loads(called["function"]["arguments"]) for called in streamed.calls()] == [{"a": 1}, {"a": 1}]
    if any_bundle.name == "glm-4.5" and not thinks:  # an end of reasoning that follows would make it a draft
        return
    kinds = [delta.kind for delta in streamed.early if delta.kind == "tool_call"]
    assert kinds, "the first call is streamed before the second is complete"


def test_a_call_is_streamed_after_the_text_before_it(any_bundle):
    *_, call = format_of(any_bundle)
    ids = any_bundle.tokenizer.encode(f"I add twice.\n{call}\n{call}", add_special_tokens=False)
    for size in range(10, len(ids), 10):
        deltas = Streamed(any_bundle, ids, [size]).deltas
        kinds = [delta.kind for delta in deltas if delta.kind != "text" or delta.text.strip()]
        assert kinds == sorted(kinds), size


def test_incomplete_characters_and_tags_are_held_back(bundle):
    increments = StreamingParser(bundle, [1], ModelCall("m", [], tools=TOOLS))

    def sent(text: str, part: slice = slice(None)) -> str:
        ids = bundle.tokenizer.encode(text, add_special_tokens=False)[part]
        return "".join(delta.text for delta in feed(increments, ids))

    assert sent("a ") == "a"
    assert sent("b<tool_ca") == " b"
    assert sent("st") == "<tool_cast"
    assert sent("€", slice(2)) == ""
    assert sent("€", slice(2, None)) == "€"
    assert sent(CALL[:-3]) == ""


def test_a_call_inside_reasoning_is_not_streamed(any_bundle):
    """A model drafts a call within its reasoning; no agent may execute it."""
    if any_bundle.name == "chatml":
        pytest.skip("it has no reasoning")
    begin, end, draft = format_of(any_bundle)
    ids = any_bundle.tokenizer.encode(f"{begin}say {draft} hm{end}so", add_special_tokens=False)
    streamed = Streamed(any_bundle, ids, [1])
    streamed.check()
    assert streamed.calls() == []
    assert streamed.text("text") == "so"


@pytest.mark.parametrize("own", ["another name", "no parser of beginnings"])
def test_a_renderer_whose_beginnings_cannot_be_read_streams_everything_at_the_end(bundle, own):
    changed = {
        "another name": {"name": "package.module.Own"},
        "no parser of beginnings": {
            "renderer": SimpleNamespace(parse_response=bundle.renderer.parse_response, reasoning_close="")
        },
    }[own]
    own = dataclasses.replace(bundle, **changed)
    streamed = Streamed(own, own.tokenizer.encode(f"hello {CALL}", add_special_tokens=False), [3])
    streamed.check()
    assert streamed.early == []
    assert streamed.text("text") == "hello"


@pytest.mark.parametrize("unit", ["</parameter></function></tool_call>", "<tool_call>", "<think>", "</think>"])
def test_the_work_that_grows_with_the_reply_is_announced(bundle, monkeypatch, unit):
    """The gateway then does it outside its event loop. `add` parses nothing, and all parses together are bounded."""
    parsed: list[int] = []
    parse = bundle.renderer.parse_beginning
    monkeypatch.setattr(
        bundle.renderer, "parse_beginning", lambda ids, **more: (parsed.append(len(ids)), parse(ids, **more))[1]
    )
    ids = bundle.tokenizer.encode(unit * 200, add_special_tokens=False)
    parser = StreamingParser(bundle, [], ModelCall("m", [], tools=TOOLS))
    for at in range(0, len(ids), 40):
        done = len(parsed)
        parser.add(ids[at : at + 40])
        assert len(parsed) == done
        if work := parser.tokens_to_parse:
            parser.parse()
            assert max(parsed[done:]) <= work
    assert sum(parsed) < 20 * len(ids) + 10_000
