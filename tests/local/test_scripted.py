import threading

import httpx
import pytest

from rollout_backend.errors import ConfigError
from rollout_backend.local.scripted import ScriptedEngine, ToolCall


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


def test_each_session_reads_the_script_from_its_start():
    with ScriptedEngine(["one", ToolCall("add", {"a": 1})]) as engine:
        assert text_of(engine, ask(engine, "a")) == "one<|im_end|>"
        assert text_of(engine, ask(engine, "b")) == "one<|im_end|>"
        assert '{"name": "add", "arguments": {"a": 1}}' in text_of(engine, ask(engine, "a"))
        used_up = ask(engine, "a")
    assert used_up.status_code == 400
    assert "more than 2 replies" in used_up.text


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
