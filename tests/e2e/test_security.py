"""Whole runs with hostile agents, and a check that no log contains a secret."""

from __future__ import annotations

import logging
from pathlib import Path
from textwrap import dedent

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.core.tasks import Task
from rollout_backend.serving.run_secret import SECRET_FILE

BARE = """
import os

for name in [name for name in os.environ if name.startswith("AWS_")]:
    del os.environ[name]

import logging
from openai import AsyncOpenAI
from agent_wrapper import RolloutApp

logging.basicConfig(level=logging.INFO)
app = RolloutApp()

@app.entrypoint
async def agent(context):
    client = AsyncOpenAI(base_url=context.base_url, api_key=context.api_key, max_retries=0)
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    await client.chat.completions.create(model=context.model, messages=messages)
    if context.payload.get("do") == "raise":
        raise ValueError("no such answer")
    aws = sorted(name for name in os.environ if name.startswith("AWS_"))
    return {"reward": 1.0, "key": context.api_key, "aws": aws}

if __name__ == "__main__":
    app.run()
"""

HOSTILE = """
from array import array
import agent_wrapper.app
from openai import AsyncOpenAI
from agent_wrapper import RolloutApp

app = RolloutApp()
honest = agent_wrapper.app.build_rollout
do = []

def build_rollout(*args):
    rollout = honest(*args)
    segment = rollout.segments[0]
    match do[0]:
        case "alter a token":
            ids = array("i", segment.token_ids)
            ids[-1] += 1
            return rollout.model_copy(update={"segments": (segment.model_copy(update={"token_ids": ids}),)})
        case "alter a logprob":
            logprobs = array("f", segment.logprobs)
            logprobs[-1] = -9.0
            return rollout.model_copy(update={"segments": (segment.model_copy(update={"logprobs": logprobs}),)})
        case "drop the seal":
            return rollout.model_copy(update={"seal": None})
        case "take another attempt's name":
            return rollout.model_copy(update={"session_id": "another-session"})
    return rollout

agent_wrapper.app.build_rollout = build_rollout

@app.entrypoint
async def agent(context):
    do.append(context.payload["do"])
    client = AsyncOpenAI(base_url=context.base_url, api_key=context.api_key, max_retries=0)
    await client.chat.completions.create(model=context.model, messages=[{"role": "user", "content": "3 + 4?"}])
    return 1.0

if __name__ == "__main__":
    app.run()
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "other-agent" / "agent.py"
    path.parent.mkdir()
    path.write_text(dedent(text))
    return path


async def test_a_container_cannot_submit_tokens_that_were_not_sampled(open_run, tmp_path):
    run = await open_run("group.size=1", script=written(tmp_path, HOSTILE))
    tricks = {
        "alter a token": "not what was sampled",
        "alter a logprob": "not what was sampled",
        "drop the seal": "is missing",
        "take another attempt's name": "is of session_id",
    }
    names = {f"task-{i}": do for i, do in enumerate([*tricks, "nothing"])}
    result = await run.manager.collect([Task(name, {"do": do}) for name, do in names.items()])
    assert result.report.balanced
    assert [names[rollout.task_id] for rollout in result.rollouts] == ["nothing"]
    assert {names[failure.task_id] for failure in result.failures} == set(tricks)
    for failure in result.failures:
        assert (failure.outcome, failure.reason) == (Outcome.INFRA_ERROR, "invalid_result")
        assert tricks[names[failure.task_id]] in failure.message


@pytest.mark.slow
async def test_without_required_seals_the_container_is_trusted(open_run, tmp_path):
    run = await open_run("group.size=1", "gateway.require_seal=false", script=written(tmp_path, HOSTILE))
    result = await run.manager.collect([Task("a", {"do": "alter a logprob"})])
    assert result.report.outcomes[Outcome.COMPLETED] == 1


@pytest.mark.parametrize(
    "presigned", [pytest.param(False, marks=pytest.mark.slow), True], ids=["credentials", "presigned"]
)
async def test_a_container_without_credentials_and_no_secret_in_any_log(open_run, agent, tmp_path, caplog, presigned):
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "rollout_backend")
    run = await open_run(
        f"storage.presigned={str(presigned).lower()}",
        "collect.list_interval_s=0.2",
        script=written(tmp_path, BARE if presigned else BARE.replace("del os", "os")),
    )
    result = await run.manager.collect([Task("a", {}), Task("b", {"do": "raise"})])
    assert result.report.outcomes[Outcome.COMPLETED] == 2
    assert result.report.outcomes[Outcome.AGENT_ERROR] == 2
    completed = [rollout for rollout in result.rollouts if rollout.outcome is Outcome.COMPLETED]
    if presigned:
        assert [rollout.extras["aws"] for rollout in completed] == [[], []]
    gateway = run.manager._run.serving.gateways
    secrets = {
        "the run's secret": (run.config.run_dir / SECRET_FILE).read_text(),
        "the secret of keys": gateway._secret,
        "the control key": gateway._shards[0]._control_key,
        "a signature of a URL": "X-Amz-Signature",
        **{f"the key of {one.rollout_id}": one.extras["key"].rpartition(".")[2] for one in completed},
    }
    logs = [path for path in tmp_path.rglob("*.log") if path.name != "moto.log"]  # moto logs request URLs
    assert {"gateway.log", "agentcore.log"} <= {path.name for path in logs}
    assert sum(path.parent == run.cloud.runtime.session_logs for path in logs) >= 4
    texts = {path.name: path.read_text() for path in logs} | {"this process": caplog.text}
    assert any("published as completed" in text for text in texts.values())
    for where, text in texts.items():
        for what, secret in secrets.items():
            assert secret not in text, f"{where} contains {what}"
