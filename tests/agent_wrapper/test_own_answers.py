"""What a proxy answers for a server that it cannot reach ends nothing, at every client of this project."""

import asyncio
from functools import partial

import pytest
from aiohttp import web

from agent_wrapper.contract import ModelEndpoint, ResultTarget
from agent_wrapper.model_endpoint import SessionClosed, probe_endpoint, send_heartbeats
from agent_wrapper.publish import Publisher, PublishError
from agent_wrapper.shared.own_answers import AGENT_SERVER, ENGINE, GATEWAY, KUBERNETES, own_answer
from agent_wrapper.shared.trajectory import TrajectoryUnavailable, fetch_trajectory
from builders import eventually, served
from rollout_backend.agents.runtimes.http import HttpRuntime, session_stopper
from rollout_backend.agents.runtimes.kubernetes.api import Cluster, ClusterCredentials, ClusterError, KubernetesApi
from rollout_backend.agents.runtimes.kubernetes.runtime import delete_job
from rollout_backend.config import HttpConfig
from rollout_backend.errors import InvokeRejected, RuntimeUnavailable
from rollout_backend.model.gateway.engine.client import EngineClient, EngineRefused
from rollout_backend.model.gateway.engine.engines import Engines
from rollout_backend.model.gateway.engine.protocol import EngineRequest

FOREIGN = {
    "nginx": (404, "default backend - 404"),
    "load balancer": (400, "<html><center>awselb/2.0</center></html>"),
    "firewall": (403, "<!DOCTYPE html><title>Request blocked</title>"),
    "API gateway": (403, '{"message": "Forbidden"}'),
    "mesh": (403, "RBAC: access denied"),
    "no body": (410, ""),
    "JSON, but no object": (404, '"not found"'),
    "precondition": (412, "<html>Precondition Failed</html>"),
    "login": (302, ""),
    "page": (200, "<html>Log in to the network</html>"),
}
REPLY = {"output_ids": [7], "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 1}}


@pytest.fixture(params=FOREIGN)
async def proxy(request):
    """A server whose first answers are a proxy's. The later ones are `answers`, its own."""
    status, text = FOREIGN[request.param]

    class Proxy:
        url = ""
        asked = 0
        foreign = 10**9
        own = web.Response

    async def handle(_):
        Proxy.asked += 1
        if Proxy.asked > Proxy.foreign:
            return Proxy.own()
        headers = {"Location": "/login"} if status == 302 else None
        return web.Response(status=status, text=text, headers=headers, content_type="text/html")

    async with served(handle) as Proxy.url:
        yield Proxy


async def test_an_engine_call_is_repeated(proxy):
    proxy.foreign, proxy.own = 1, lambda: web.json_response(REPLY)
    client = EngineClient(Engines(proxy.url), 120.0, 5)
    await client.start()
    assert (await client.generate(EngineRequest([1], {"max_new_tokens": 4}))).token_ids == (7,)
    await client.close()


async def test_a_session_of_an_agent_server_neither_ends_nor_fails_for_good(proxy):
    runtime = await HttpRuntime.open(HttpConfig(url=proxy.url))
    with pytest.raises(RuntimeUnavailable):
        await runtime.invoke("session", b"{}")
    with pytest.raises(RuntimeUnavailable):
        await runtime.stop("session")
    with pytest.raises(RuntimeUnavailable):
        await asyncio.to_thread(session_stopper(runtime.cleanup_spec().options), "session")
    await runtime.aclose()


async def test_a_job_is_neither_gone_nor_refused(proxy):
    import aiohttp

    async with aiohttp.ClientSession() as http:
        api = KubernetesApi(Cluster(proxy.url, None, ClusterCredentials(None)), "default", http)
        for call in (delete_job(api, "session"), api.call("POST", api.path("jobs"), {})):
            with pytest.raises((aiohttp.ClientError, ValueError)) as raised:
                await call
            assert not isinstance(raised.value, ClusterError)


async def test_an_agents_container_waits_for_its_gateway(proxy):
    endpoint = ModelEndpoint(
        base_url=f"{proxy.url}/v1",
        name="model",
        api_key="key",
        trajectory_url=f"{proxy.url}/trajectory",
        heartbeat_url=f"{proxy.url}/beat",
    )
    assert "could not reach" in await probe_endpoint(endpoint, 0.5, beat=True)
    with pytest.raises(TrajectoryUnavailable):
        await fetch_trajectory(endpoint, 1.0)
    for waiting in (
        probe_endpoint(endpoint, 3600.0, beat=True),
        fetch_trajectory(endpoint, 3600.0),
        send_heartbeats(f"{proxy.url}/beat", "key", 0.01),
    ):
        enough, task = proxy.asked + 3, asyncio.create_task(waiting)
        await eventually(lambda: proxy.asked >= enough)  # noqa: B023
        assert not task.done()
        task.cancel()


async def write(url, limit_s=60.0):
    """Write a result by a presigned URL."""
    limit = partial(asyncio.timeout, limit_s)
    await Publisher().write(ResultTarget(bucket="bucket"), "key", b"result", limit, f"{url}/key")


async def test_a_result_is_written_after_a_proxys_answers(proxy):
    proxy.foreign, proxy.own = 2, web.Response
    await write(proxy.url)
    assert proxy.asked == 3
    proxy.foreign = 10**9
    with pytest.raises(PublishError):
        await write(proxy.url, 0.5)


@pytest.mark.parametrize(
    ("form", "body"),
    [
        (ENGINE, '{"error": {"message": "the context is too long"}}'),
        (ENGINE, '{"object": "error", "message": "no"}'),
        (ENGINE, '{"detail": [{"loc": ["body"], "msg": "field required"}]}'),
        (AGENT_SERVER, '{"error": "SessionNotFound"}'),
        (GATEWAY, '{"error": {"message": "closed", "code": "session_closed"}}'),
        (KUBERNETES, '{"kind": "Status", "reason": "NotFound"}'),
    ],
)
def test_a_servers_own_refusal_counts(form, body):
    assert own_answer(body, form)


async def test_own_refusals_end_what_was_asked(caplog):
    async def refuse(request):
        if request.path == "/generate":
            return web.json_response({"error": {"message": "too long"}}, status=400)
        if request.method == "PUT":
            return web.Response(status=412, text="<Error><Code>PreconditionFailed</Code></Error>")
        error = {"message": "closed"} if request.path == "/beat" else "SessionNotFound"
        return web.json_response({"error": error}, status=410 if request.path == "/beat" else 404)

    async with served(refuse) as url:
        client = EngineClient(Engines(url), 120.0, 5)
        await client.start()
        with pytest.raises(EngineRefused):
            await client.generate(EngineRequest([1], {"max_new_tokens": 4}))
        await client.close()
        runtime = await HttpRuntime.open(HttpConfig(url=url))
        with pytest.raises(InvokeRejected):
            await runtime.invoke("session", b"{}")
        await runtime.stop("session")
        await runtime.aclose()
        await write(url)
        assert "exists: another attempt wrote it" in caplog.text
        endpoint = ModelEndpoint(
            base_url=url, name="model", api_key="key", trajectory_url=url, heartbeat_url=f"{url}/beat"
        )
        with pytest.raises(SessionClosed):
            await probe_endpoint(endpoint, 60.0, beat=True)
