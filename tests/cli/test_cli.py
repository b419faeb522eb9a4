"""Bad input at the command line: a clear error that says what to do, before anything is started."""

import os
import re

from anyio.from_thread import start_blocking_portal

from builders import refused
from rollout_backend.config import AwsConfig, StorageConfig
from rollout_backend.run.collect.store import ResultStore
from rollout_backend.run.lease import LeaseHolder, RunLease
from rollout_backend.workbench.local.cloud import LocalRuntime
from rollout_backend.workbench.local.scripted import ScriptedEngine


def test_without_credentials(rollout, settings, tasks, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for command in (("run", settings(), "--tasks", tasks), ("doctor", settings(), "--services")):
        refused(rollout(*command), "no local cloud of yours runs", "there are no AWS credentials", "AWS_PROFILE")


def test_services_that_are_missing_or_do_not_answer(rollout, settings, tasks):
    config = settings(storage={"bucket": "no-such-bucket"})
    refused(
        rollout("doctor", config, "--services"),
        "bucket 'no-such-bucket' does not exist",
        "storage.bucket",
        "no agent server answers at http://127.0.0.1:9",
        "runtime.url",
    )
    config = settings(aws={"endpoint_url": "http://127.0.0.1:9"})
    refused(rollout("run", config, "--tasks", tasks), "no local cloud of yours runs at 127", "aws.endpoint_url")


def test_a_check_reports_the_runtime_of_an_image_and_creates_nothing(rollout, settings, tmp_path):
    agent = tmp_path / "agent.py"
    agent.write_text("raise SystemExit(1)")
    with start_blocking_portal() as portal:
        local = LocalRuntime(agent, run_dir=tmp_path, env={}, preload=False)
        with portal.wrap_async_context_manager(local):
            runtime = {"kind": "agentcore", "image": local.image, "role": local.role}
            config = settings(runtime={**runtime, "endpoint_url": local.endpoint_url})
            for _ in range(2):
                code, output = rollout("doctor", config, "--services", "-v")
                assert code == 0, output
                assert re.search(f"runtime rollout_agent_[0-9a-f]+: would be made from {local.image}", output)
            config = settings(runtime={**runtime, "name": "local", "endpoint_url": local.endpoint_url})
            refused(rollout("doctor", config, "--services"), "was not made by this backend", "runtime.name")


def test_a_queue_that_does_not_exist(rollout, settings, tasks, local_aws, agent_server):
    queue = {"url": f"{local_aws.endpoint_url}/000000000000/no-such-queue"}
    config = settings(queue=queue, runtime={"kind": "http", "url": agent_server})
    refused(rollout("run", config, "--tasks", tasks), "no-such-queue does not exist", "queue.url")


def test_a_batch_that_cannot_start_in_time_is_refused_before_anything_starts(rollout, settings, tasks, agent_server):
    limits = {"invoke_per_s": 0.01, "max_sessions": 2}
    config = settings(runtime={"kind": "http", "url": agent_server, **limits}, group={"size": 40})
    said = "rollouts cannot finish within timeouts.collection_s (3600 s): at runtime.invoke_per_s=0.01"
    refused(rollout("run", config, "--tasks", tasks), said)
    check = "doctor", config, "--tasks", tasks, "--services"
    refused(rollout(*check), said)
    code, output = rollout(*check, "-o", "runtime.invoke_per_s=10", "-o", "group.size=4", "-v")
    assert code == 0, output
    assert "4 rollouts start within 0 s, at 10 sessions per second" in output
    assert "in 2 waves of 2 sessions (runtime.max_sessions)" in output


def test_a_run_that_another_manager_holds_is_refused(rollout, settings, tasks, agent_server, local_aws):
    async def hold() -> RunLease:
        store = await ResultStore.open(StorageConfig(bucket=local_aws.bucket), AwsConfig(endpoint_url=url))
        lease = RunLease(store, "held", LeaseHolder.this_process(), 600.0)
        await lease.begin()
        await lease.claim()
        return lease

    url = local_aws.endpoint_url
    with start_blocking_portal() as portal, ScriptedEngine(["7"]) as engine:
        lease = portal.call(hold)
        serving = {"kind": "external", "urls": [engine.url]}
        config = settings(run_id="held", runtime={"kind": "http", "url": agent_server}, serving=serving)
        code, output = rollout("run", config, "--tasks", tasks)
        assert code == 1, output
        assert f"run 'held' is held by another manager (process {os.getpid()} on" in output
        assert engine.requests == []
        portal.call(lease.release)
        portal.call(lease._store.aclose)


def test_a_deployment_that_lacks_something_names_it(rollout, tmp_path):
    for arguments, words in (
        ((), "name the agent's folder AGENT_DIR, or a runtime with --adopt"),
        (("--adopt", "arn:no"), "--adopt arn:no is no ARN of an AgentCore runtime"),
        ((tmp_path, "--adopt", "arn:no"), "--adopt takes a runtime as it is: omit AGENT_DIR"),
        (("NOPE", "--local"), "there is no folder NOPE"),
        ((tmp_path, "--local", "--build", "codebuild"), "omit it here, and give it with --stack"),
        ((tmp_path, "--local", "--subnet", "subnet-1"), "omit them here, and give them with --stack"),
    ):
        refused(rollout("deploy", *arguments), words)
