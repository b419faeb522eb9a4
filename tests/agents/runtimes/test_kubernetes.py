"""The Kubernetes runtime against an unkind cluster: what each fault means to the step.

Containers are stand-ins in this process; `tests/e2e/test_kubernetes.py` runs real agents.
"""

import asyncio
import base64
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from pydantic import ValidationError

from agent_wrapper.contract import PAYLOAD_VARIABLE, REQUEST_FIELD, RolloutRequest
from builders import background, eventually, run_config, served, skip_to_end
from kubernetes_bench import IMAGE, Bench, Containers, payload
from rollout_backend.agents.runtimes.kubernetes import api
from rollout_backend.agents.runtimes.kubernetes.api import ExecPlugin, load_cluster, proxy_of
from rollout_backend.agents.runtimes.kubernetes.manifests import job_manifest
from rollout_backend.agents.runtimes.kubernetes.pods import pod_state
from rollout_backend.agents.runtimes.kubernetes.runtime import RULES, KubernetesRuntime
from rollout_backend.config import KubernetesConfig
from rollout_backend.core.harbor import TaskContainer
from rollout_backend.core.session_ends import SessionEnd
from rollout_backend.errors import (
    ConfigError,
    ContainerStartTimeout,
    InvokeRejected,
    NoCredentials,
    OutcomeUnknown,
    PreflightError,
    QuotaExceeded,
    RuntimeCallError,
    RuntimeConflict,
    RuntimeUnavailable,
    Throttled,
)
from rollout_backend.run.janitor.__main__ import stop_sessions
from tests.emulators.kubernetes_emulator import ApiFault, KubernetesEmulator, write_kubeconfig


@pytest.fixture
async def open_bench(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Bench]]]:
    async with AsyncExitStack() as stack:

        async def open_(**settings: Any) -> Bench:
            containers = Containers()
            cluster = await stack.enter_async_context(KubernetesEmulator({IMAGE: containers}, tmp_path))
            given = {"image": IMAGE, "kubeconfig": cluster.kubeconfig, "start_timeout_s": 120, **settings}
            config = KubernetesConfig.model_validate(given)
            runtime = await KubernetesRuntime.open(config)
            runtime.exit_s = 0.05
            stack.push_async_callback(runtime.aclose)
            bench = Bench(cluster, runtime, containers, config)
            watching = asyncio.create_task(runtime.watch_sessions("run", bench.on_end))
            stack.callback(watching.cancel)
            return bench

        yield open_


@pytest.fixture
async def bench(open_bench: Callable[..., Awaitable[Bench]]) -> Bench:
    return await open_bench()


async def test_an_attempt_is_one_job_with_its_payload_in_a_secret(bench):
    await bench.runtime.check(session_s=90)
    answer = await bench.runtime.invoke("rollout-1", payload("rollout-1", question="why?"))
    assert json.loads(answer) == {"status": "accepted"}
    assert bench.cluster.names("jobs") == bench.cluster.names("secrets") == ["rollout-1"]
    job, secret = bench.cluster.created
    assert "secret" not in json.dumps(job["spec"]["template"]["spec"]["containers"])
    assert (
        secret["metadata"]["ownerReferences"][0]["uid"] == bench.cluster.find("jobs", "rollout-1")["metadata"]["uid"]
    )
    assert job["spec"]["activeDeadlineSeconds"] == 120 + 60 + 30 + 60
    [container] = bench.containers.started
    served = json.loads(container.payload())
    assert served["question"] == "why?"
    assert RolloutRequest.parse(served[REQUEST_FIELD]).session_id == "rollout-1"
    assert base64.b64decode(secret["data"]["payload.json"]) == container.payload()
    await bench.runtime.stop("rollout-1")
    await bench.runtime.stop("rollout-1")
    await bench.runtime.stop("never-there")
    assert bench.cluster.names("jobs") == bench.cluster.names("secrets") == []
    await eventually(lambda: bench.cluster.names("pods") == [])
    assert bench.ends == []


async def test_a_container_that_has_exited_keeps_its_log_and_is_reported(bench):
    await bench.runtime.invoke("rollout-1", payload("rollout-1"))
    bench.containers.started[0].exit(0)
    end = await bench.end()
    assert (end.session_id, end.reason) == ("rollout-1", "agent_ended")
    assert "kubectl logs --namespace rollouts job/rollout-1" in end.message
    await bench.runtime.stop("rollout-1")
    assert bench.cluster.names("jobs") == ["rollout-1"]  # until its ttl


async def test_the_cluster_is_reached_through_the_proxy_that_the_environment_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    path = write_kubeconfig(tmp_path / "config", {"server": "http://k.example:6443"}, {})
    runtime = await KubernetesRuntime.open(KubernetesConfig(image=IMAGE, kubeconfig=path))
    with pytest.raises(PreflightError, match=r"127\.0\.0\.1:9"):
        await runtime.check(session_s=90)
    await runtime.aclose()


async def test_a_proxy_that_answers_for_the_cluster_starts_and_stops_no_session(tmp_path):
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async with served(answer) as url:
        path = write_kubeconfig(tmp_path / "config", {"server": url}, {})
        runtime = await KubernetesRuntime.open(KubernetesConfig(image=IMAGE, kubeconfig=path))
        with pytest.raises(RuntimeUnavailable, match="no object of Kubernetes"):
            await runtime.invoke("rollout-1", payload("rollout-1"))
        with pytest.raises(OutcomeUnknown, match="no object of Kubernetes"):
            await runtime.stop("rollout-1")
        await runtime.aclose()


@pytest.mark.parametrize(
    ("server", "direct"),
    [
        ("https://k.example", False),
        ("https://k.internal.example:6443", True),
        ("https://10.96.0.1", True),
        ("https://192.168.1.1:6443", False),
        ("https://127.0.0.1:6443", True),
        ("https://[::1]:6443", True),
        ("https://[fd00::1]:6443", True),
        ("https://[fd00::2]:6443", True),
        ("https://[fd00::3]:6443", False),
        ("https://localhost:6443", True),
        ("http://k.example", True),
    ],
)
def test_the_proxy_is_the_one_that_kubectl_would_use(server, direct, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "no_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "proxy:3128")
    monkeypatch.setenv("NO_PROXY", ".internal.example, 10.0.0.0/8, fd00::1, [fd00::2], no network/8")
    assert proxy_of(server) == (None if direct else "http://proxy:3128")


async def test_containers_that_a_mesh_injects_are_not_taken_for_the_agents(bench):
    bench.cluster.mesh = True
    await bench.runtime.invoke("rollout-1", payload("rollout-1"))
    assert bench.ends == []
    bench.containers.started[0].exit(0)
    assert (await bench.end()).reason == "agent_ended"
    await bench.runtime.stop("rollout-1")
    assert bench.cluster.names("jobs") == [], "its other containers would run on"


@pytest.mark.parametrize(
    ("fate", "reason", "words"),
    [
        ("is killed for memory", "out_of_memory", "more memory than its limit"),
        ("exits with 1", "container_lost", "exit code 1"),
        ("is evicted", "evicted", "EvictionByEvictionAPI: the node is drained"),
    ],
)
async def test_a_container_that_ends_is_reported_at_once(bench, fate, reason, words):
    bench.cluster.fates.append(fate)
    await bench.runtime.invoke("rollout-1", payload("rollout-1"))
    end = await bench.end()
    assert (end.session_id, end.reason) == ("rollout-1", reason)
    assert words in end.message
    await bench.runtime.stop("rollout-1")
    assert len(bench.ends) == 1


@pytest.mark.parametrize(
    ("fate", "reason", "words", "kept"),
    [
        ("cannot pull its image", "image_pull_failed", "manifest unknown", []),
        ("cannot be started", "container_error", "executable file not found", ["rollout-1"]),
        ("cannot be scheduled", "unschedulable", "3 Insufficient memory", []),
    ],
)
async def test_a_container_that_does_not_start_fails_its_invoke(bench, fate, reason, words, kept):
    bench.cluster.fates.append(fate)
    invoking = asyncio.create_task(bench.runtime.invoke("rollout-1", payload("rollout-1")))
    if reason == "unschedulable":
        watched = bench.runtime._watch("run")._sessions
        await eventually(lambda: "rollout-1" in watched and not watched["rollout-1"].state.schedulable)
        await skip_to_end(asyncio.wait([invoking]))
    with pytest.raises(ContainerStartTimeout, match=words) as caught:
        await invoking
    assert caught.value.reason == reason
    assert not caught.value.never_opened
    await bench.runtime.stop("rollout-1")
    assert bench.cluster.names("jobs") == kept
    assert bench.ends == []


async def test_an_invoke_waits_for_a_late_node(bench):
    bench.cluster.fates.append("is scheduled late")
    await bench.runtime.invoke("rollout-1", payload("rollout-1"))
    assert len(bench.containers.started) == 1


async def test_a_quota_of_pods_is_a_refusal_of_the_same_session(open_bench):
    bench = await open_bench(start_timeout_s=10**6, read_timeout_s=10**6)
    bench.cluster.fates.append("exceeds the quota")
    invoking = asyncio.create_task(bench.runtime.invoke("rollout-1", payload("rollout-1")))
    await eventually(lambda: bench.cluster._events)
    await skip_to_end(asyncio.wait([invoking]))
    with pytest.raises(QuotaExceeded, match="exceeded quota") as caught:
        await invoking
    assert caught.value.refused
    assert not caught.value.never_opened  # its Job must be stopped
    bench.cluster.raise_quota()
    while not bench.containers.started:
        with contextlib.suppress(QuotaExceeded):  # as before, if the cluster takes long: its event is still there
            await bench.runtime.invoke("rollout-1", payload("rollout-1"))
    assert len(bench.containers.started) == 1


async def test_a_watch_that_something_else_answers_without_an_end_is_opened_again(open_bench, monkeypatch):
    monkeypatch.setattr(api, "_WATCH_S", 1)
    monkeypatch.setattr(api, "_LATE_S", 0)
    bench = await open_bench()
    bench.cluster.trickles = 2
    bench.cluster.cut_watches()
    await bench.runtime.invoke("rollout-1", payload("rollout-1"))
    assert bench.cluster.trickles == 0


async def test_a_refusal_that_arrives_in_pieces_is_the_api_servers():
    async def refuse(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(status=409)
        await answer.prepare(request)
        status = b'{"kind": "Status", "reason": "AlreadyExists", "message": "the Job exists"}'
        for piece in (status[:20], status[20:]):
            await answer.write(piece)
            # The client reads the first piece alone.
            await asyncio.sleep(0.1)
        return answer

    async with served(refuse) as url, aiohttp.ClientSession() as http:
        with pytest.raises(api.ClusterError, match="AlreadyExists"):
            await api.KubernetesApi(api.Cluster(url, None, api.ClusterCredentials(None)), "default", http).call(
                "POST", "/"
            )


@pytest.mark.parametrize(
    ("kind", "error", "never_opened"),
    [
        ("quota", QuotaExceeded, True),
        ("cut", RuntimeUnavailable, False),
    ],
)
async def test_a_refused_create_is_repeated_for_the_same_session(bench, kind, error, never_opened):
    bench.cluster.faults.append(ApiFault(kind, "POST", "*/jobs"))
    with pytest.raises(error) as caught:
        await bench.runtime.invoke("rollout-1", payload("rollout-1"))
    assert caught.value.refused
    assert caught.value.never_opened == never_opened
    await bench.runtime.invoke("rollout-1", payload("rollout-1"))
    assert bench.cluster.names("jobs") == ["rollout-1"]
    assert len(bench.containers.started) == 1


@pytest.mark.parametrize("kind", ["throttle", "lose answer"])
async def test_a_refused_secret_leaves_a_job_that_may_be_open(bench, kind):
    bench.cluster.faults.append(ApiFault(kind, "POST", "*/secrets"))
    with pytest.raises(RuntimeCallError) as caught:
        await bench.runtime.invoke("rollout-1", payload("rollout-1"))
    assert caught.value.refused
    assert not caught.value.never_opened
    await bench.runtime.invoke("rollout-1", payload("rollout-1"))
    assert len(bench.containers.started) == 1


async def test_missing_permissions_name_the_rule(bench):
    bench.cluster.denied |= {("jobs", "create"), ("pods", "watch")}
    problems = {each.name: each.text for each in await bench.runtime.check() if each.level == "problem"}
    assert problems.keys() == {"runtime-create-jobs", "runtime-watch-pods"}
    assert '{apiGroups: ["batch"], resources: ["jobs"], verbs: ["create"]}' in problems["runtime-create-jobs"]
    assert '{apiGroups: [""], resources: ["pods"], verbs: ["watch"]}' in problems["runtime-watch-pods"]
    with pytest.raises(InvokeRejected, match="Add to the Role") as refused:
        await bench.runtime.invoke("rollout-1", payload("rollout-1"))
    assert refused.value.reason == "access_denied"
    assert refused.value.never_opened
    bench.cluster.denied = {("secrets", "create")}  # which leaves a Job to stop
    with pytest.raises(InvokeRejected, match=r'apiGroups: \[""\], resources: \["secrets"\]') as refused:
        await bench.runtime.invoke("rollout-1", payload("rollout-1"))
    assert not refused.value.never_opened


async def test_a_new_token_is_read_and_an_old_one_is_renewed(bench):
    await bench.runtime.invoke("rollout-1", payload("rollout-1"))
    bench.cluster.rotate_token()
    bench.cluster.cut_watches()
    await bench.runtime.invoke("rollout-2", payload("rollout-2"))
    bench.cluster.token_file.write_text("expired")
    with pytest.raises(NoCredentials, match="401"):
        await bench.runtime.invoke("rollout-3", payload("rollout-3"))
    bench.cluster.rotate_token()
    await bench.runtime.stop("rollout-1")
    assert bench.cluster.names("jobs") == ["rollout-2"]


async def test_no_end_is_lost_while_watches_are_cut_and_versions_are_forgotten(bench):
    for i in range(4):
        await bench.runtime.invoke(f"rollout-{i}", payload(f"rollout-{i}"))
    bench.cluster.cut_watches()
    bench.containers.started[0].exit(1)
    assert (await bench.end()).session_id == "rollout-0"
    bench.cluster.faults.append(ApiFault("unavailable", "GET", "*/pods", times=2))
    bench.cluster.cut_watches()
    bench.containers.started[1].exit(1)
    bench.cluster.forget_versions()
    assert (await bench.end()).session_id == "rollout-1"
    bench.cluster.faults.append(ApiFault("cut", "GET", "*/pods", times=2))
    bench.cluster.cut_watches()
    await bench.cluster.delete_pod("rollout-2")
    bench.cluster.forget_versions()
    end = await bench.end()
    assert (end.session_id, end.reason) == ("rollout-2", "evicted")
    assert len(bench.ends) == 3


async def test_a_watch_that_ends_after_its_time_is_opened_at_the_bookmark(bench):
    bench.cluster.watch_s = 0.05
    await bench.runtime.invoke("rollout-1", payload("rollout-1"))
    watches = ("GET", "/api/v1/namespaces/rollouts/pods")
    seen = bench.cluster.calls.count(watches)
    await eventually(lambda: bench.cluster.calls.count(watches) > seen + 2)
    bench.containers.started[0].exit(1)
    assert (await bench.end()).session_id == "rollout-1"
    assert len(bench.ends) == 1


async def test_a_later_trainer_sees_the_end_of_a_session_that_it_adopts(bench):
    await bench.runtime.invoke("rollout-1", payload("rollout-1"))
    later = await KubernetesRuntime.open(bench.config)
    seen: asyncio.Queue[SessionEnd] = asyncio.Queue()
    async with asyncio.timeout(120), background(later.watch_sessions("run", seen.put_nowait)):
        bench.containers.started[0].exit(1)
        assert (await seen.get()).session_id == "rollout-1"
    await later.aclose()


async def test_a_payload_above_the_limit_of_a_secret_is_refused(bench):
    with pytest.raises(InvokeRejected, match=r"a Secret holds at most 1,048,576"):
        await bench.runtime.invoke("rollout-1", payload("rollout-1", blob="x" * 1_048_576))
    with pytest.raises(InvokeRejected, match="requests no rollout"):
        await bench.runtime.invoke("rollout-1", b"{}")
    assert bench.cluster.created == []


async def test_a_job_that_is_being_deleted_is_a_conflict(bench, monkeypatch):
    await bench.runtime.invoke("rollout-1", payload("rollout-1"))
    monkeypatch.setattr(bench.cluster, "find", lambda resource, name: None)  # deleted after the create was refused
    with pytest.raises(RuntimeConflict):
        await bench.runtime.invoke("rollout-1", payload("rollout-1"))


async def test_the_janitor_deletes_the_jobs(bench):
    await bench.runtime.invoke("rollout-1", payload("rollout-1"))
    bench.cluster.faults.append(ApiFault("throttle", "DELETE"))
    spec = json.loads(json.dumps(dataclasses.asdict(bench.runtime.cleanup_spec())))
    ended = await asyncio.to_thread(stop_sessions, spec, 1000, ["rollout-1", "unknown"], (0.0,))
    assert ended == ["rollout-1", "unknown"]
    assert bench.cluster.names("jobs") == []


async def test_a_refusal_names_the_time_after_which_it_may_be_repeated(bench):
    bench.cluster.faults.append(ApiFault("throttle", "POST", "*/jobs"))
    with pytest.raises(Throttled) as caught:
        await bench.runtime.invoke("rollout-1", payload("rollout-1"))
    assert caught.value.retry_after_s == 2
    bench.cluster.faults.append(ApiFault("throttle", "GET", "/version"))
    with pytest.raises(PreflightError, match="429 TooManyRequests"):
        await bench.runtime.check()


async def test_tls_is_verified_by_the_kubeconfigs_authority(tmp_path):
    import ssl

    import trustme

    authority = trustme.CA()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    async with KubernetesEmulator({}, tmp_path, tls=tls, authority=tmp_path / "ca.pem") as cluster:
        config = KubernetesConfig(image=IMAGE, kubeconfig=cluster.kubeconfig)
        runtime = await KubernetesRuntime.open(config)
        assert [each.level for each in await runtime.check()] == ["ok"] * (len(RULES) + 2)
        await runtime.aclose()
        tree = yaml.safe_load(cluster.kubeconfig.read_text())
        del tree["clusters"][0]["cluster"]["certificate-authority"]
        cluster.kubeconfig.write_text(yaml.safe_dump(tree))
        runtime = await KubernetesRuntime.open(config)
        with pytest.raises(PreflightError, match="certificate"):
            await runtime.check()
        await runtime.aclose()


# --- credentials ------------------------------------------------------------------------------------------


async def test_an_exec_plugin_runs_again_when_its_token_is_refused_or_expires(tmp_path):
    script = tmp_path / "plugin"
    script.write_text(
        f"""#!/bin/sh
echo x >> {tmp_path}/runs
count=$(wc -l < {tmp_path}/runs | tr -d ' ')
echo '{{"status": {{"token": "token-'$count'", "expirationTimestamp": "'$EXPIRES'"}}}}'
"""
    )
    script.chmod(0o755)

    def plugin(expires: str) -> ExecPlugin:
        env = [{"name": "EXPIRES", "value": expires}]
        spec = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin", "env": env}
        return ExecPlugin(spec, tmp_path)

    lasting = plugin("2999-01-01T00:00:00Z")
    assert await lasting.token() == "token-1"
    assert await lasting.token() == "token-1"
    assert await lasting.token(refused="token-1") == "token-2"
    assert await lasting.token(refused="token-1") == "token-2"  # renewed by another call
    over = plugin("2000-01-01T00:00:00Z")
    assert [await over.token(), await over.token()] == ["token-3", "token-4"]
    script.write_text("#!/bin/sh\necho 'log in first' >&2\nexit 1\n")
    with pytest.raises(NoCredentials, match="exited with code 1 and printed no token; it wrote: log in first"):
        await over.token()


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ({"username": "u"}, "username is not supported"),
        ({"auth-provider": {"name": "gcp"}}, "auth-provider is not supported"),
    ],
)
def test_a_kubeconfig_with_what_is_not_supported_is_refused(tmp_path, user, words):
    path = write_kubeconfig(tmp_path / "config", {"server": "https://k:6443"}, user)
    with pytest.raises(PreflightError, match=words):
        load_cluster(path, None)
    with pytest.raises(PreflightError, match="has no context 'x'"):
        load_cluster(path, "x")
    with pytest.raises(PreflightError, match=r"set runtime\.kubeconfig and runtime\.context"):
        load_cluster(tmp_path / "missing", None)


# --- pure -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("why", "reason"), [("Evicted", "evicted"), ("OutOfcpu", "container_lost")])
def test_a_failed_pod_says_why(why, reason):
    state = pod_state({"metadata": {"name": "p"}, "status": {"phase": "Failed", "reason": why}})
    assert (state.finished, state.problem and state.problem.reason) == (True, reason)


@pytest.mark.parametrize("task", [None, TaskContainer(image="task")], ids=["the agent's image", "a task's image"])
def test_pods_meet_the_standard_that_is_set(task):
    """Check the fields that Pod Security Admission checks for `restricted`."""
    request = RolloutRequest.parse(json.loads(payload("s"))[REQUEST_FIELD])
    for standard in ("baseline", "restricted"):
        config = KubernetesConfig(image=IMAGE, pod_security=standard)
        pod = job_manifest(config, "s", request, task)["spec"]["template"]["spec"]
        contexts = [each["securityContext"] for each in [*pod["containers"], *pod.get("initContainers", ())]]
        assert all(each["seccompProfile"] == {"type": "RuntimeDefault"} for each in contexts)
        for each in contexts if standard == "restricted" else ():
            assert (each["allowPrivilegeEscalation"], each["runAsNonRoot"]) == (False, True)
            assert each["capabilities"] == {"drop": ["ALL"]}
        assert {kind for volume in pod["volumes"] for kind in volume} <= {"name", "secret", "emptyDir"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"requests": {"cpu": "a lot"}}, "a quantity such as 500m or 2Gi"),
        ({"tolerations": [{"name": "x"}]}, "name: a toleration has effect, key"),
        ({"environment": {PAYLOAD_VARIABLE: "/x"}}, "is set by the backend"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ValidationError, match=words):
        KubernetesConfig(image=IMAGE, **settings)


def test_a_start_timeout_above_the_sessions_time_is_refused():
    runtime = {"kind": "kubernetes", "image": IMAGE}
    with pytest.raises(ConfigError, match=r"runtime\.start_timeout_s \(1920\) is not below timeouts\.agent_s"):
        run_config(runtime={**runtime, "start_timeout_s": 1920})
    assert run_config(runtime={**runtime, "start_timeout_s": 1919}).runtime.kind == "kubernetes"
