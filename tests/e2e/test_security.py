"""A whole run with hostile agents, and a check that no log contains a secret."""

import logging

from agent_wrapper.contract import Outcome
from agent_wrapper.contract.codec import unpack
from rollout_backend.core.tasks import Task
from rollout_backend.model.serving.run_secret import secret_file

HOSTILE = """
import logging, os
from array import array

for name in [name for name in os.environ if name.startswith("AWS_")]:
    del os.environ[name]

import agent_wrapper.app
from openai import AsyncOpenAI
from agent_wrapper import RolloutApp

logging.basicConfig(level=logging.INFO)
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
    if do[0] == "raise":
        raise ValueError(f"no such answer from {client.base_url} with {context.api_key}")
    return {"reward": 1.0, "reversed": context.api_key[::-1], "key": [context.api_key, context.base_url]}

if __name__ == "__main__":
    app.run()
"""
TRICKS = {
    "alter a token": "not what was sampled",
    "alter a logprob": "not what was sampled",
    "drop the seal": "is missing",
    "take another attempt's name": "is of session_id",
}


async def stored_objects(run) -> dict[str, str]:
    """Return all objects of the run in S3 as text, by key."""
    texts = {}
    async with run.cloud.storage.s3() as s3:
        found = await s3.list_objects_v2(Bucket=run.cloud.storage.bucket, Prefix=f"runs/{run.config.run_id}/")
        for key in (each["Key"] for each in found["Contents"]):
            data = await (await s3.get_object(Bucket=run.cloud.storage.bucket, Key=key))["Body"].read()
            compact = data.startswith(b"\x28\xb5\x2f\xfd")  # zstd
            texts[key] = repr(unpack(data)) if compact else data.decode()
    return texts


async def test_containers_submit_only_sampled_tokens_and_nothing_stored_has_a_secret(open_run, tmp_path, caplog):
    """The containers have no credentials, and the keys are in the URLs, which clients log."""
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "rollout_backend")
    script = tmp_path / "other-agent" / "agent.py"
    script.parent.mkdir()
    script.write_text(HOSTILE)
    settings = ("storage.presigned=true", "gateway.key_in_path=true", "collect.list_interval_s=0.2")
    run = await open_run("group.size=1", *settings, script=script)
    names = {f"task-{i}": do for i, do in enumerate([*TRICKS, "nothing", "raise"])}
    result = await run.manager.collect([Task(name, {"do": do}) for name, do in names.items()])
    assert result.report.balanced
    [completed] = [rollout for rollout in result.rollouts if rollout.outcome is Outcome.COMPLETED]
    assert names[completed.task_id] == "nothing"
    failures = {names[failure.task_id]: failure for failure in result.failures}
    assert failures.pop("raise").outcome is Outcome.AGENT_ERROR
    assert failures.keys() == TRICKS.keys()
    for do, failure in failures.items():
        assert (failure.outcome, failure.reason) == (Outcome.INFRA_ERROR, "invalid_result")
        assert TRICKS[do] in failure.message

    gateway = run.manager._run.serving.gateways
    secrets = {
        "the run's secret": secret_file(run.config).read_text(),
        "the secret of keys": gateway._secret,
        "the control key": gateway._shards[0]._control_key,
        "a signature of a URL": "X-Amz-Signature",
        "the agent's key": completed.extras["reversed"][::-1].rpartition(".")[2],
    }
    assert completed.extras["key"][0] == "[session key]"
    assert "/k/[session key]/v1" in completed.extras["key"][1]
    logs = list(tmp_path.rglob("*.log"))
    assert {"gateway.log", "agentcore.log"} <= {path.name for path in logs}
    assert sum(path.parent == run.cloud.runtime.session_logs for path in logs) >= len(names)
    texts = {path.name: path.read_text() for path in logs} | {"this process": caplog.text}
    assert any("/k/.../v1/chat/completions" in text for text in texts.values()), "agents' clients log their calls"
    texts |= await stored_objects(run)
    assert sum("/steps/" in name for name in texts) >= len(names)
    assert any("/manifests/" in name for name in texts)
    assert any("published as completed" in text for text in texts.values())
    texts |= {
        path.name: path.read_text(errors="replace")
        for path in (tmp_path / "runs" / run.config.run_id).rglob("*.json*")
    }
    for where, text in texts.items():
        for what, secret in secrets.items():
            assert secret not in text, f"{where} contains {what}"
