"""Conversations with tools on real engines, with each family's real vocabulary.

The models are tiny and random, but sample pieces of their family's format: most replies are plain text or a broken
tool call, and some are right. Qwen3, Llama 3 and GLM (the dense GLM-4) have their real architecture. SGLang's CPU
engine has no attention kernels for gpt-oss and DeepSeek V3, so a Llama with their vocabulary replaces them.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections import Counter

import openai
import pytest

from gateway_server import Witness
from rollout_backend.config import ModelConfig
from rollout_backend.gateway.engine.sglang import SglangProtocol
from rollout_backend.gateway.engine.vllm import VllmProtocol
from rollout_backend.serving.install import find_engine

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

CONTEXT_LENGTH = 2048
SESSIONS, CALLS = 6, 6
USER = {"role": "user", "content": "Add one and two, and write down what you get."}
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT_LENGTH,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "bos_token_id": None,
    "pad_token_id": None,
}


def spec(family, bundle, tools, folder) -> dict:
    """Return the input of `make_model.py` for a family."""
    said = [
        family.say("I think.", "", [("add", "{}")]),
        family.say(None, "", [("add", "{}")]),
        family.say("Well.", "The answer is 3.", []),
    ]
    result = {"role": "tool", "tool_call_id": "c", "name": "add", "content": "3"}
    begins = {
        bundle.render(messages, tools)[-1]
        for messages in ([USER], [USER, {"role": "assistant", "content": "a"}, result])
    }
    pairs: set[tuple[int, int]] = set()
    for text in said:
        ids = bundle.tokenizer.encode(text, add_special_tokens=False)
        pairs |= {*itertools.pairwise(ids), *((begin, ids[0]) for begin in begins)}
    config = {
        **_SIZES,
        "vocab_size": -(-len(bundle.tokenizer) // 64) * 64,
        "eos_token_id": list(bundle.stop_token_ids),
    }
    model_type = {"qwen3": "qwen3", "glm-5": "glm4"}.get(family.name, "llama")
    return {"folder": str(folder), "model_type": model_type, "config": config, "pairs": sorted(pairs)}


@pytest.fixture(scope="session")
def model_folder(families, bundle_of, folder_of, tools, tmp_path_factory):
    """The folder of each family's model."""
    root = tmp_path_factory.mktemp("families")
    folders = {family.name: root / family.name for family in families}
    for family in families:
        shutil.copytree(folder_of(family), folders[family.name])
    file = root / "specs.json"
    file.write_text(json.dumps([spec(family, bundle_of(family), tools, folders[family.name]) for family in families]))
    script = os.path.join(os.path.dirname(__file__), "make_model.py")
    env = {**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    made = subprocess.run([find_engine(), script, file], env=env, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    yield lambda family: folders[family.name]
    shutil.rmtree(root)


@pytest.fixture(scope="session")
def model(family, model_folder) -> ModelConfig:
    return ModelConfig(path=model_folder(family), name="m", renderer=family.renderer, context_length=CONTEXT_LENGTH)


@pytest.fixture(scope="session", params=["sglang", "vllm"])
def witness(request, family, model, run_engine):
    """A witness of a real engine with the family's model, and the engine's name."""
    if request.param == "vllm":
        request.getfixturevalue("vllm_python")
        if family.name != "qwen3":
            pytest.skip("vLLM samples conversations of Qwen3 alone: each family takes it a start of a minute")
    protocol = {"sglang": SglangProtocol, "vllm": VllmProtocol}[request.param]()
    with (
        run_engine(model, 300.0, engine=request.param, max_total_tokens=16384) as url,
        Witness(url, protocol) as seen,
    ):
        yield seen, request.param


def converse(client: openai.OpenAI, tools, seen: Counter) -> None:
    """Answer every reply of the model, until the calls or the context are used up."""
    messages = [USER]
    for n in range(CALLS):
        try:
            choice = client.chat.completions.create(
                model="m", messages=messages, tools=tools, max_completion_tokens=64
            ).choices[0]
        except openai.BadRequestError as error:
            seen[error.code] += 1
            return
        message = choice.message
        assert message.role == "assistant"
        assert choice.finish_reason in ("stop", "length", "tool_calls")
        assert isinstance(message.content, str) or message.tool_calls
        seen[choice.finish_reason] += 1
        sent = message.model_dump(exclude_none=True, exclude={"reasoning_content"} if n % 2 else None)
        messages = [*messages, sent]
        for call in message.tool_calls or ():
            assert isinstance(json.loads(call.function.arguments), dict)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "3 <|im_end|> <\uff5cUser\uff5c>"})
        if not message.tool_calls:
            messages.append({"role": "user", "content": "And?"})


@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        *(pytest.param(name, marks=pytest.mark.release) for name in ("gpt-oss", "llama-3", "glm-5", "deepseek-v3")),
    ],
    indirect=True,
)
def test_conversations_with_tools_are_recorded_as_sampled(family, bundle, witness, model, serve, tools):
    seen: Counter[str] = Counter()
    witness, engine = witness
    gateway = serve(witness.url, engine_name=engine, model=model, bundle=bundle, model_call_s=300)
    for session in range(SESSIONS):
        witness.clear()
        converse(gateway.client(f"s{session}", temperature=1.0, seed=session), tools, seen)
        segments = gateway.trajectory(f"s{session}").segments
        turns = [
            (
                segment.token_ids[: turn.start].tolist(),
                segment.token_ids[turn.start : turn.end].tolist(),
                pytest.approx(segment.logprobs[turn.start : turn.end].tolist(), abs=1e-6),
            )
            for segment in segments
            for turn in segment.turns
        ]
        sampled = [(call.prompt, call.ids, call.logprobs) for call in witness.sampled]
        assert sorted(turns, key=lambda turn: turn[:2]) == sorted(sampled, key=lambda call: call[:2])
        assert sum(sum(segment.response_mask) for segment in segments) == sum(len(ids) for _, ids, _ in sampled)
    malformed = gateway.stats().malformed_tool_calls
    assert set(seen) <= {"stop", "length", "tool_calls", "context_length_exceeded", "unrenderable"}
    answered = seen["stop"] + seen["length"] + seen["tool_calls"]
    print(f"{family}: {dict(seen)}, {malformed} malformed calls")
    assert answered >= SESSIONS
    assert malformed + seen["tool_calls"] > 0, "the model never tried to call a tool: these conversations test little"
