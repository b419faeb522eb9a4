import threading

import httpx
import pytest

from rollout_backend.errors import ConfigError
from rollout_backend.local.scripted import LOGPROB, Fail, ScriptedEngine, ToolCall


def ask(engine: ScriptedEngine, session: str = "s", text: str = "hi", **params) -> httpx.Response:
    ids = engine.tokenizer.encode(text, add_special_tokens=False).ids
    return httpx.post(
        f"{engine.url}/generate",
        json={"input_ids": ids, "rid": "r", "sampling_params": {"max_new_tokens": 100, **params}},
        headers={"X-SMG-Routing-Key": session},
        timeout=60,
    )


def text_of(engine: ScriptedEngine, response: httpx.Response) -> str:
    return engine.tokenizer.decode(response.json()["output_ids"], skip_special_tokens=False)


def test_answer_has_sglangs_format():
    with ScriptedEngine(["Grüß"]) as engine:
        engine.weight_version = "7"
        answer = ask(engine).json()
    meta = answer["meta_info"]
    n = len("Grüß".encode()) + 1
    assert len(answer["output_ids"]) == n
    assert [entry[:2] for entry in meta["output_token_logprobs"]] == [[LOGPROB, id_] for id_ in answer["output_ids"]]
    assert meta["weight_versions"] == [{"version": "7", "start": 0, "end": n}]
    assert meta["finish_reason"] == {"type": "stop", "matched": engine.tokenizer.token_to_id("<|im_end|>")}
    assert meta["prompt_tokens"] == 2


def test_each_session_reads_the_script_from_its_start():
    with ScriptedEngine(["one", ToolCall("add", {"a": 1})]) as engine:
        assert text_of(engine, ask(engine, "a")) == "one<|im_end|>"
        assert text_of(engine, ask(engine, "b")) == "one<|im_end|>"
        assert '{"name": "add", "arguments": {"a": 1}}' in text_of(engine, ask(engine, "a"))
        used_up = ask(engine, "a")
    assert used_up.status_code == 400
    assert "more than 2 replies" in used_up.text


def test_session_with_a_separate_script():
    with ScriptedEngine(["default"]) as engine:
        engine.script("a", ["mine"])
        assert text_of(engine, ask(engine, "a")) == "mine<|im_end|>"
        assert text_of(engine, ask(engine, "b")) == "default<|im_end|>"


def test_scripted_failure():
    with ScriptedEngine([Fail(503, "busy"), "then"]) as engine:
        assert ask(engine).status_code == 503
        assert text_of(engine, ask(engine)) == "then<|im_end|>"


def test_max_new_tokens_and_stop_strings_cut_the_answer():
    with ScriptedEngine(lambda _: "one two three") as engine:
        cut = ask(engine, max_new_tokens=3).json()
        stopped = ask(engine, stop=["two"]).json()
    assert (len(cut["output_ids"]), cut["meta_info"]["finish_reason"]["type"]) == (3, "length")
    assert stopped["text"] == "one two"
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "two"}


def test_engine_ends_while_an_answer_is_blocked():
    held = threading.Event()
    with ScriptedEngine(lambda _: "late" if held.wait(300) else "never") as engine:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{engine.url}/generate", json={"input_ids": [5]}, timeout=httpx.Timeout(60, read=0.2))
        held.set()
    assert not engine._thread.is_alive()


def test_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ScriptedEngine([], model_path=tmp_path)
