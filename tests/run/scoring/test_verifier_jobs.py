"""The verifiers of Harbor tasks on Kubernetes, against an unkind cluster. Containers are objects in this process."""

import asyncio
import base64
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import pytest

from agent_wrapper.contract import Artifact
from agent_wrapper.contract.messages import ORDER, TESTS, VerifierOrder
from agent_wrapper.shared.workspace import WORKSPACE
from builders import eventually
from kubernetes_bench import IMAGE, Containers, payload
from rollout_backend.agents.runtimes.kubernetes.runtime import KubernetesRuntime
from rollout_backend.config import AwsConfig, KubernetesConfig, ScoringConfig, StorageConfig
from rollout_backend.core.harbor import CONTAINER_FIELD, TaskContainer
from rollout_backend.run.collect.presign import Presigner
from rollout_backend.run.dispatch.call_queue import CallKind, CallQueue
from rollout_backend.run.scoring.verifier_jobs import VerifierJobs
from rollouts import make_rollout
from tests.emulators.kubernetes_emulator import ApiFault, KubernetesEmulator

TASK = "registry.example.com/tasks/t:1"


class Calls(CallQueue):
    """Notes which calls were admitted, and which were refused."""

    def __init__(self, invoke_per_s: float, stop_per_s: float) -> None:
        super().__init__(invoke_per_s, stop_per_s)
        self.admitted: list[CallKind] = []

    async def admit(self, call: CallKind) -> None:
        self.admitted.append(call)
        await super().admit(call)


@dataclass
class Verifiers:
    """Verifier Jobs in a cluster, and what they report to the janitor."""

    cluster: KubernetesEmulator
    containers: Containers
    jobs: VerifierJobs
    runtime: KubernetesRuntime
    calls: Calls
    open: list[str] = field(default_factory=list)

    async def call(self, **private: Any) -> dict[str, Any]:
        workspace = b"files"
        rollout = make_rollout("t.0", reward=0.0, artifacts=[Artifact.of(WORKSPACE, workspace)])
        harbor = {"tests": base64.b64encode(b"tests").decode(), "timeout_s": 90.0, "env": {"A": "b"}, **private}
        request = {
            "task_id": "t",
            "payload": {CONTAINER_FIELD: {"image": TASK}},
            "private": {"harbor": harbor},
            "result": rollout.encode(),
            "artifacts": {WORKSPACE: workspace},
        }
        return await self.jobs.call(msgpack.packb(request))

    async def until_started(self, verifiers: int) -> None:
        await eventually(lambda: len(self.containers.started) >= verifiers)

    async def exit(self, code: int, message: str, nth: int = 0) -> None:
        """End the container of the nth verifier, once it runs."""
        await self.until_started(nth + 1)
        self.containers.started[nth].exit(code, message)

    def files(self) -> dict[str, bytes]:
        """Return the content of the last Secret."""
        secret = [each for each in self.cluster.created if each["kind"] == "Secret"][-1]
        return {name: base64.b64decode(data) for name, data in secret["data"].items()}


@pytest.fixture(scope="module")
def presigner() -> Iterator[Presigner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield Presigner(StorageConfig(bucket="results"), AwsConfig(region="us-east-1"))


@pytest.fixture
async def verifiers(tmp_path: Path, presigner: Presigner) -> AsyncIterator[Verifiers]:
    containers = Containers()
    async with KubernetesEmulator({IMAGE: Containers(exit_code=0), TASK: containers}, tmp_path) as cluster:
        config = KubernetesConfig(image=IMAGE, kubeconfig=cluster.kubeconfig, start_timeout_s=120)
        runtime = await KubernetesRuntime.open(config)
        runtime.exit_s = 0.05
        calls = Calls(10.0, 10.0)
        jobs = VerifierJobs(
            runtime,
            presigner,
            ScoringConfig(timeout_s=80.0, processes=2),
            admission=calls,
            on_open=lambda session: found.open.append(session),
            on_closed=lambda session: found.open.remove(session),
        )
        found = Verifiers(cluster, containers, jobs, runtime, calls)
        yield found
        await jobs.aclose()
        await runtime.aclose()


@pytest.mark.parametrize("mesh", [False, True], ids=["alone", "beside a mesh's containers"])
async def test_the_reward_comes_from_a_job_with_the_tests_and_a_url_of_the_artifacts(verifiers, mesh):
    verifiers.cluster.mesh = mesh
    calling = asyncio.create_task(verifiers.call())
    await verifiers.exit(0, json.dumps({"reward": 0.5, "passed": 2}))
    score = await calling
    assert (score["reward"], score["extras"], score["scorer"]) == (0.5, {"passed": 2}, "verify")
    files = verifiers.files()
    order = VerifierOrder.parse(json.loads(files[ORDER]))
    assert files[TESTS] == b"tests"
    assert "artifacts" in order.artifacts_url
    assert "X-Amz-Signature" in order.artifacts_url
    assert (order.timeout_s, order.env) == (80.0, {"A": "b"})  # scoring.timeout_s is the lower one
    assert [each.name for each in order.artifacts] == [WORKSPACE]
    [job] = [each for each in verifiers.cluster.created if each["kind"] == "Job"]
    assert job["metadata"]["labels"]["rollout-backend/run"] == "run"
    assert verifiers.open == []


@pytest.mark.parametrize(
    ("code", "message", "words"),
    [
        (1, "the tests wrote no reward.txt", "has no reward: the tests wrote no reward.txt. Its log: kubectl logs"),
        (2, "", "exit code 2"),
        (0, "", "reported '', and no reward"),
        (0, "[" * 4000, "and no reward"),
        (0, "[1]", "no reward: [1]"),
        (0, '{"reward": null}', "reward"),
    ],
)
async def test_a_verifier_without_a_reward_is_a_failure_and_never_a_zero(verifiers, code, message, words):
    calling = asyncio.create_task(verifiers.call())
    await verifiers.exit(code, message)
    answer = await calling
    assert answer.keys() == {"error"}
    assert words in answer["error"]
    assert verifiers.open == []


async def test_a_verifier_that_does_not_end_is_deleted(verifiers):
    verifiers.runtime.verifier_spare_s = 0.1
    answer = await verifiers.call(timeout_s=0.1)
    assert "has not ended within 0.2 s" in answer["error"]
    assert verifiers.cluster.names("jobs") == verifiers.open == []


async def test_a_cancelled_verifier_is_deleted_although_the_cluster_is_slow(verifiers):
    verifiers.cluster.faults.append(ApiFault("unavailable", "DELETE"))
    calling = asyncio.create_task(verifiers.call())
    await verifiers.until_started(1)
    assert len(verifiers.open) == 1
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await verifiers.jobs.aclose()
    assert verifiers.cluster.names("jobs") == verifiers.open == []


async def test_verifiers_are_as_many_as_scoring_allows_and_pass_through_the_queue_of_calls(verifiers):
    calling = [asyncio.create_task(verifiers.call()) for _ in range(3)]
    await verifiers.until_started(2)
    assert len(verifiers.open) == 2  # the third one waits for a place
    for nth in range(3):
        await verifiers.exit(0, '{"reward": 1}', nth)
    assert [(await call)["reward"] for call in calling] == [1.0, 1.0, 1.0]
    counted = Counter(verifiers.calls.admitted)
    assert counted == {CallKind.VERIFY: 3, CallKind.STOP: 3}


@pytest.mark.parametrize("refusal", ["throttle", "unauthorized"])
async def test_a_refused_verifier_is_started_again_and_slows_all_starts_down(verifiers, refusal):
    verifiers.cluster.faults += [ApiFault(refusal, "POST", "*/jobs")] * 3
    calling = asyncio.create_task(verifiers.call())
    await verifiers.exit(0, '{"reward": 1}')
    assert (await calling)["reward"] == 1.0
    assert verifiers.open == []
    assert verifiers.calls.invoke_per_s < 10.0
    assert Counter(verifiers.calls.admitted)[CallKind.STOP] == 1, "nothing was opened by the others"


async def test_a_trainer_that_takes_a_run_over_stops_the_verifiers_of_the_killed_one(verifiers, presigner):
    scored = asyncio.create_task(verifiers.call())
    await verifiers.exit(0, '{"reward": 1}')
    await scored  # its Job remains until its log has expired
    earlier = asyncio.create_task(verifiers.call())
    await verifiers.until_started(2)
    await verifiers.runtime.invoke("rollout-1", payload("rollout-1"))  # an agent outlives its trainer
    other = make_rollout("t.0", run_id="another")
    elsewhere = asyncio.create_task(
        verifiers.runtime.run_verifier("verifier-9", other, TaskContainer(image=TASK), {}, 30.0)
    )
    await verifiers.until_started(3)
    [mine] = verifiers.open

    outage = ApiFault("unavailable", "GET", "*/pods", times=10**6)  # the watch of the pods meets it too
    verifiers.cluster.faults.append(outage)
    await verifiers.jobs.stop_earlier("run")  # it is a warning
    verifiers.cluster.faults.remove(outage)
    assert mine in verifiers.cluster.names("jobs")
    await verifiers.jobs.stop_earlier("run")
    assert mine not in verifiers.cluster.names("jobs")
    assert {"rollout-1", "verifier-9"} < set(verifiers.cluster.names("jobs"))
    assert len(verifiers.cluster.names("jobs")) == 3
    async with asyncio.timeout(120):
        assert (await earlier).keys() == {"error"}  # of the killed trainer, if it still runs
    elsewhere.cancel()
    await asyncio.gather(elsewhere, return_exceptions=True)


async def test_what_is_no_harbor_task_is_named(verifiers):
    request = {"task_id": "t", "payload": {}, "private": {}, "result": make_rollout("t.0").encode(), "artifacts": {}}
    answer = await verifiers.jobs.call(msgpack.packb(request))
    assert "is no Harbor task" in answer["error"]
    assert verifiers.cluster.created == []
