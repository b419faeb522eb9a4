"""The load on a cluster's router and gateways, smaller: parts are killed, and each reply is checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from agent_wrapper.contract import Segment, Trajectory, Turn
from rollout_backend.local.scripted import BYTE_MODEL, LOGPROB

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_agents_see_no_failed_call_and_get_the_engines_tokens(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "cluster_load.py"),
        "--smoke",
        "--json",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out").read_text())
    assert (found["failed"], found["wrong"]) == ({}, [])
    assert found["sessions_closed"] >= 40
    assert {"router restarted", "gateway restarted"} <= found["events"].keys()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"reply": "Something else."}, "is not the engine's"),
        ({"logprob": 2 * LOGPROB}, "a logprob"),
        ({"calls": 2}, "2 calls were answered"),
    ],
)
def test_what_differs_from_the_replies_is_found(monkeypatch: pytest.MonkeyPatch, change, why: str) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import cluster_load

    encode = Tokenizer.from_file(str(BYTE_MODEL / "tokenizer.json")).encode
    prompt = "What is 3 + 4?"
    given = encode(prompt, add_special_tokens=False).ids
    reply = encode(change.get("reply", cluster_load.answer(prompt)) + "<|im_end|>", add_special_tokens=False).ids
    segment = Segment(
        token_ids=(*given, *reply),
        response_mask=(0,) * len(given) + (1,) * len(reply),
        logprobs=(None,) * len(given) + (change.get("logprob", LOGPROB),) * len(reply),
        turns=(Turn(start=len(given), end=len(given) + len(reply), finish_reason="stop", weight_versions=()),),
    )
    sealed = Trajectory(model="m", segments=(segment,)).encode()

    found = cluster_load.difference(sealed, change.get("calls", 1))

    assert why in found
    assert bool(why) == bool(found)
