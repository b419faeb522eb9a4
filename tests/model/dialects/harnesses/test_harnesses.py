"""Real harnesses, unmodified and pinned, in environments of their own, against the gateway and a scripted engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from harnesses import COPILOT, FOLDER, HARNESSES, NEW, OLD, PYTHON, TASK, find_python, installed
from rollout_backend.model.rendering.renderer import load_renderer
from rollout_backend.workbench.local.scripted import ScriptedEngine
from token_exact import is_as_sampled
from vocabularies import tokenizer_folder

OFFLINE = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
}


def reply(replies: Sequence[str], prompt: str) -> str:
    """Return the reply after the replies that the prompt has; a side conversation, without tools, gets another."""
    if "<tool_call>" in replies[0] and "<tools>" not in prompt:
        return "A title."
    # DSPy's prompts have no earlier replies, but one observation for each.
    said = prompt.count("<|im_start|>assistant\n") - 1 + prompt.count("## observation_")
    return replies[min(said, len(replies) - 1)]


@pytest.fixture
def repository(tmp_path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "double.py").write_text(f"def double(n):\n    {OLD}\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "start"]):
        subprocess.run([*git, *arguments], cwd=folder, check=True)
    return folder


QUICK = "Claude Code-messages", "Vercel AI SDK-messages"
CASES = [
    pytest.param(each, api, False, id=name, marks=() if name in QUICK else pytest.mark.release)
    for each in HARNESSES
    for api in each.apis
    for name in [f"{each.name}-{api}"]
]
CASES.append(pytest.param(COPILOT, "responses", True, id="Copilot CLI-reasoning", marks=pytest.mark.release))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the first time, it installs the harness
@pytest.mark.skipif(shutil.which("npm") is None, reason="half of the harnesses need Node.js")
@pytest.mark.parametrize(("harness", "api", "reasons"), CASES)
def test_a_conversation_has_the_rows_that_the_page_states(
    serve, byte_model, byte_bundle, repository, tmp_path, harness, api, reasons
):
    if (python := PYTHON.get(harness.pins)) and find_python(python) is None:
        pytest.skip(f"it needs Python {python}, which neither uv nor pyenv has")
    packages = installed(harness.pins)
    replies = [text.replace("REPOSITORY", str(repository)) for text in harness.replies]
    model, bundle = byte_model.model_copy(update={"context_length": 1_000_000}), byte_bundle
    if reasons:
        replies = [f"<think>\nI reason.\n</think>\n\n{text}" for text in replies]
        model = model.model_copy(update={"path": tokenizer_folder("qwen3"), "renderer": "qwen3"})
        bundle = load_renderer(model)
    answer = partial(reply, replies)
    with ScriptedEngine(answer, model.path) as engine:
        gateway = serve(engine.url, model=model, bundle=bundle)
        given = {
            "BASE_URL": f"{gateway.url}/v1",
            "API_KEY": gateway.key(),
            "MODEL": model.name,
            "CONTEXT_LENGTH": str(model.context_length),
            "TASK": TASK,
        }

        def filled(text: str) -> str:
            return re.sub(rf"\b({'|'.join(given)})\b", lambda word: given[word[0]], text)

        for name, text in harness.files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(filled(text))
        folder = repository
        if harness.script:
            folder = shutil.copytree(FOLDER / "scripts", tmp_path / "scripts")
            (folder / "node_modules").symlink_to(packages / "node_modules")
        env = {
            **OFFLINE,
            **given,
            "API": api,
            "HOME": str(tmp_path),
            "PATH": os.pathsep.join([f"{packages}/bin", f"{packages}/node_modules/.bin", os.environ["PATH"]]),
            **{name: filled(value) for name, value in harness.env.items()},
        }
        argv = ["timeout", "--kill-after", "9", "240", "bash", "-c", filled(harness.command)]
        done = subprocess.run(
            argv, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        trajectory, stats = gateway.trajectory(), gateway.stats()
    printed = done.stdout[-3000:] + done.stderr[-3000:]
    if harness.script:
        assert "10" in done.stdout, printed
    else:
        assert (repository / "double.py").read_text() == f"def double(n):\n    {NEW}\n", printed
    assert [segment.split_reason for segment in trajectory.segments] == list(harness.reasons)
    is_as_sampled(trajectory, engine, answer, harness.stop)
    assert stats.errors.keys() == {*harness.errors}
