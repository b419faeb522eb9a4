"""The learning run for a GPU, at small size on the CPU, and its task in both loops."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.tool_registry import initialize_tools_from_config
from verl.utils.dataset.rl_dataset import RLHFDataset

from rollout_backend.model.rendering.chatml import ChatMLRenderer


def test_verls_tool_loop_and_the_gateway_have_the_same_tokens_and_reward(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(repository / "benchmarks")
    import gpu_learning
    import lock_tool

    model, code = tmp_path / "model", "375"
    gpu_learning.make_model(model, gpu_learning.SMALL)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    replies = [*["<tool_call>\n" + json.dumps({"name": "look", "arguments": {}}) + "\n</tool_call>"] * 2, "379"]
    replies_ids = [[*tokenizer.encode(reply, add_special_tokens=False), end] for reply in replies]

    renderer = ChatMLRenderer(tokenizer)
    asked = [{"role": "user", "content": gpu_learning.question(code)}]
    prompt = renderer.render_ids(asked, tools=[gpu_learning.LOOK], add_generation_prompt=True)
    ids, sampled = prompt, 0
    for digit, reply in zip("37", replies_ids, strict=False):
        note = {"role": "tool", "content": digit * gpu_learning.NOTE}
        bridged = renderer.bridge_to_next_turn(ids, reply, [note])
        assert bridged is not None
        ids, sampled = bridged.token_ids, sampled + len(reply)
    ids, sampled = ids + replies_ids[-1], sampled + len(replies_ids[-1])

    script = iter(replies_ids)

    class Server:
        async def generate(self, **_: Any) -> Any:
            reply = next(script)
            return SimpleNamespace(
                token_ids=reply, log_probs=[-1.0] * len(reply), num_preempted=0, routed_experts=None, extra_fields={}
            )

    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(gpu_learning.TOOLS))
    multi_turn = {
        **dict.fromkeys(("max_user_turns", "max_assistant_turns")),
        "max_parallel_calls": 1,
        "max_tool_response_length": 256,
        "tool_response_truncate_side": "middle",
        "format": "hermes",
    }
    rollout = {"multi_turn": multi_turn, "prompt_length": 1024, "response_length": 512, "full_determinism": False}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})

    async def play() -> Any:
        loop = ToolAgentLoop(
            trainer_config=SimpleNamespace(config=config),
            server_manager=Server(),
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=SimpleNamespace(config=OmegaConf.create({})),
            hf_model_type=json.loads((model / "config.json").read_text())["model_type"],
            tools=ToolListWrap(initialize_tools_from_config(str(tools))),
        )
        return await loop.run({}, raw_prompt=asked, tools_kwargs={"look": {"create_kwargs": {"code": code}}})

    output = asyncio.run(play())
    assert (output.prompt_ids, output.prompt_ids + output.response_ids) == (prompt, ids)
    assert sum(output.response_mask) == sampled
    text = tokenizer.decode(output.response_ids, skip_special_tokens=True)
    assert lock_tool.compute_score("benchmark", text, code) == pytest.approx(2 / 3)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(1800)
def test_the_learning_run_continues_after_a_kill(tmp_path: Path, repository: Path) -> None:
    written, work = tmp_path / "found.json", tmp_path / "work"
    script = repository / "benchmarks" / "gpu_learning.py"
    command = [sys.executable, str(script), "--smoke", "--work", str(work), "--json", str(written)]
    with subprocess.Popen(command) as killed:
        while not (written.exists() and json.loads(written.read_text())["results"]["runs"]):
            assert killed.poll() is None
            time.sleep(0.5)
        killed.kill()
    [found] = json.loads(written.read_text())["results"]["runs"]
    assert (found["variant"], len(found["right"])) == ("ours", 2)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(written.read_text())["results"]
    runs = {run["variant"]: run for run in results["runs"]}
    assert [(name, len(run["right"]), run["started"]) for name, run in runs.items()] == [
        ("ours", 3, 2),
        ("verl", 3, 1),
    ]
    for run in runs.values():
        # The engine sampled with the trainer's weights.
        assert max(run["prob_diff"]) < 1e-4
        assert run["busy"] > 0
        assert all(tokens > 0 for tokens in run["tokens"])
    rollouts = runs["ours"]["rollouts"]
    assert rollouts["planned"] == rollouts["trainable"] == 48
    assert rollouts["one step"] == 16
