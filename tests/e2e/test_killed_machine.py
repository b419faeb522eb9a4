"""Real engines on the CPU on Ray's test cluster of three machines, with router and gateways, and a machine that dies.

The model is random and tiny, so only the tokens' path is real, not what they say. The agent's reward is a checksum of
the replies that it read, so an invented reward or a reply with other tokens would show.
"""

import asyncio
import zlib
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from agent_wrapper.contract import Outcome
from builders import eventually, kinds
from ray_cluster import REMOVABLE, machine, ray_machines
from rollout_backend.core.tasks import Task
from rollout_backend.manager import RolloutManager
from rollout_backend.model.serving.install import find_engine
from rollout_backend.model.serving.supervisor import ServingEvent
from rollout_backend.run.accounts.step_report import StepResult
from rollout_backend.testing.forward_pass import reference_logprobs
from rollout_backend.workbench.local.cloud import LocalCloud
from tiny_engine import check_versions, cpu_config, make_models

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.release, pytest.mark.timeout(900)]

GROUP = 4
TASKS = [Task(f"t{i}", {"questions": [f"What is {i} + 4?", "Are you sure?"]}) for i in range(64)]
WARM_UP = [Task(f"w{i}", task.payload) for i, task in enumerate(TASKS[:4])]

AGENT = """
import zlib
from openai import AsyncOpenAI
from agent_wrapper import RolloutApp

app = RolloutApp()

@app.entrypoint
async def agent(context):
    messages = []
    async with AsyncOpenAI(**context.openai_kwargs()) as client:
        for question in context.payload["questions"]:
            messages.append({"role": "user", "content": question})
            reply = await client.chat.completions.create(model=context.model, messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    said = "".join(message["content"] for message in messages[1::2])
    return {"reward": zlib.crc32(said.encode()) / 2**32}

if __name__ == "__main__":
    app.run()
"""


async def test_a_killed_machine_loses_no_rollout(repository, tmp_path, monkeypatch):
    tiny_model = tmp_path / "model"
    make_models(find_engine(), repository, tiny_model)
    events = list[ServingEvent]()
    (tmp_path / "agent.py").write_text(AGENT)
    # An engine fills a machine, and so do both gateways: one engine at least is on a machine that can be lost.
    with ray_machines({"num_cpus": 2}, [{"num_cpus": 2}] * 2) as machines:
        async with LocalCloud(tmp_path / "agent.py", run_dir=tmp_path / "logs") as cloud:
            for name, value in cloud.environ.items():
                monkeypatch.setenv(name, value)
            overrides = (
                "router.host=0.0.0.0",
                "gateway={kind: ray, processes: 2}",
                "sampling.max_tokens=8",
                "timeouts={model_call_s: 300, agent_s: 400, collection_s: 600, session_key_s: 700}",
            )
            serving = {"kind": "ray", "threads": 2, "servers": 2, "min_servers": 2, "startup_timeout_s": 300}
            config = cpu_config(cloud, tiny_model, tmp_path, *overrides, **serving)
            async with RolloutManager(config, on_serving=events.append) as manager:
                await manager.collect(WARM_UP)
                undisturbed = await manager.collect(TASKS)
                collecting = asyncio.create_task(manager.collect(TASKS))
                await _some_are_done(manager, len(TASKS))
                lost = next(each for each in manager.servers() if machine(each.url) in REMOVABLE)
                await machines.lose(machine(lost.url))
                await eventually(lambda: kinds(events, lost.name)[-2:] == ["died", "waiting"], 120)
                [router] = [each.url for each in manager.servers() if each.name == "router"]
                [kept] = [each.url for each in manager.servers() if each.serving and each.name != "router"]
                assert await _urls_in(router) == [kept]
                disturbed = await collecting
                machines.add(REMOVABLE[2], num_cpus=2)
                await eventually(lambda: kinds(events, lost.name)[-1] == "restarted", 240)
                assert len(await _urls_in(router)) == 2
            assert (await cloud.sessions())["sessions"] == []
    for result in (undisturbed, disturbed):
        _check_step(result, tiny_model)
    segments = [segment for rollout in disturbed.rollouts for segment in rollout.segments]
    tokens = [list(segment.token_ids) for segment in segments]
    check_versions(segments, {"0": await asyncio.to_thread(reference_logprobs, find_engine(), tiny_model, tokens)})
    times = f"{undisturbed.report.seconds:.1f} s, and in {disturbed.report.seconds:.1f} s with a machine killed"
    print(f"{len(disturbed.rollouts)} rollouts in {times}")


def _check_step(result: StepResult, model: Path) -> None:
    """Check that each rollout is there once, and that its reward is the checksum of the tokens to train."""
    planned = sorted(f"{task.task_id}.{i}" for task in TASKS for i in range(GROUP))
    report, tokenizer = result.report, Tokenizer.from_file(str(model / "tokenizer.json"))
    assert report.balanced
    assert report.outcomes[Outcome.COMPLETED] == report.planned == report.trainable == len(planned), result.failures
    assert sorted(rollout.rollout_id for rollout in result.rollouts) == planned
    assert all(group.usable for group in result.groups)
    for rollout in result.rollouts:
        [segment] = rollout.segments
        turns = [segment.token_ids[turn.start : turn.end] for turn in segment.turns]
        said = [tokenizer.decode(ids, skip_special_tokens=False).removesuffix("<|im_end|>") for ids in turns]
        assert len(said) == 2
        assert rollout.reward == zlib.crc32("".join(said).encode()) / 2**32
    use = report.engine_use
    assert use is not None
    assert use.running > 0
    assert use.kv_used is not None


async def _urls_in(router: str) -> list[str]:
    async with httpx.AsyncClient(timeout=60) as http:
        workers = (await http.get(f"{router}/workers")).json()["workers"]
    return [worker["url"] for worker in workers]


async def _some_are_done(manager: RolloutManager, number: int) -> None:
    async def reached() -> bool:
        return sum((await manager.progress()).outcomes.values()) >= number

    await eventually(reached, 300)
