import threading

import httpx
import pytest

from rollout_backend.errors import ConfigError
from rollout_backend.workbench.local.scripted import ScriptedEngine


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
