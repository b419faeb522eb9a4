import asyncio
import importlib.util
import io
import json
import os
import signal
import socket
from collections import Counter

import aiohttp
import pytest

from builders import eventually, generate, post, run_config
from rollout_backend.base.check_result import CheckResult
from rollout_backend.config import RouterConfig
from rollout_backend.errors import ConfigError, StartupError
from rollout_backend.model.gateway.engine.client import EngineClient
from rollout_backend.model.gateway.engine.engines import Engines
from rollout_backend.model.gateway.engine.protocol import EngineRequest
from rollout_backend.model.serving.router import EngineDirectory, Router, router_command
from rollout_backend.model.serving.server_process import free_port
from rollout_backend.run.checks.machine import check_machine
from rollout_backend.workbench.local.scripted import ScriptedEngine

KINDS = ("sglang-router", "smg")
SMG_SLOW = ("sglang-router", pytest.param("smg", marks=pytest.mark.slow))


@pytest.fixture(params=SMG_SLOW)
async def router(request, tmp_path):
    async with Router(RouterConfig(kind=request.param), tmp_path / "router.log", model_call_s=120) as router:
        yield router


async def call(router: Router, key: str, tokens: int = 1) -> tuple[int, int | None]:
    """Return the status of a call, and the process that answered it."""
    status, answer = await generate(router.url, key, tokens)
    return status, answer.get("pid")


def test_the_command_line_bounds_every_wait_and_smgs_own_protections_are_off():
    argv, smg = (
        router_command(RouterConfig(kind=kind, host="0.0.0.0"), 5000, 5001, model_call_s=12.5) for kind in KINDS
    )
    assert "sglang_router" in argv[2]
    given = dict(zip(argv[3::2], argv[4::2], strict=True))
    assert given["--host"] == "0.0.0.0"
    assert given["--request-timeout-secs"] == "13"
    assert int(given["--worker-startup-timeout-secs"]) <= 10
    assert given["--policy"] == "manual"
    own = ("--disable-worker-overload-protection", "--disable-load-monitoring", "--max-concurrent-requests", "0")
    assert smg[1:] == ["-m", "smg.launch_router", *argv[3:], *own]


def test_a_missing_smg_is_refused_with_the_command_that_installs_it(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "smg" else find(name, *more))
    with pytest.raises(ConfigError, match=r"router\.kind=smg.*pip install '\.\[smg\]'"):
        Router(RouterConfig(kind="smg"), tmp_path / "router.log")
    Router(RouterConfig(), tmp_path / "router.log")
    [found] = router_findings("smg")
    assert found.level == "problem"
    assert "pip install '.[smg]'" in found.text


def router_findings(kind: str) -> list[CheckResult]:
    config = run_config(model={"path": "absent"}, router={"kind": kind})  # no renderer is loaded
    return [found for found in check_machine(config) if found.setting == "router.kind"]


@pytest.mark.parametrize("router", KINDS, indirect=True)
async def test_sessions_are_spread_and_sticky(router, start_engine):
    (url_a, a), (url_b, b) = await asyncio.gather(start_engine(), start_engine())
    await asyncio.gather(router.add(url_a), router.add(url_b))
    assert set(await router.workers()) == {url_a, url_b}
    first, again = [await asyncio.gather(*(call(router, f"session-{i}") for i in range(40))) for _ in "ab"]
    assert first == again
    counts = Counter(first)
    assert set(counts) == {(200, a.pid), (200, b.pid)}
    assert min(counts.values()) >= 10


async def test_add_and_remove_are_idempotent(router, start_engine):
    url, _ = await start_engine()
    await router.add(url)
    await router.add(url)
    assert list(await router.workers()) == [url]
    await router.remove(url)
    await router.remove(url)
    assert await router.workers() == {}
    await router.add(url)
    assert list(await router.workers()) == [url]


async def test_adding_a_dead_engine_fails_with_the_reason(router):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(StartupError, match=f"(?s)did not take the engine {url}[:.].*[Hh]ealth check"):
        await router.add(url, timeout_s=120)
    assert await router.workers() == {}


async def test_a_removed_engine_gets_no_new_call_and_finishes_those_in_flight(router, start_engine):
    (url_a, a), (url_b, b) = await asyncio.gather(start_engine(), start_engine())
    await asyncio.gather(router.add(url_a), router.add(url_b))
    keys = [f"session-{i}" for i in range(20)]
    pinned = [key for key in keys if await call(router, key) == (200, a.pid)]
    in_flight = asyncio.create_task(call(router, pinned[0], tokens=10**6))
    await eventually(lambda: "generates 1000000" in a.log.read_text())
    await router.remove(url_a)
    assert set(await router.workers()) == {url_b}
    assert {await call(router, key) for key in keys} == {(200, b.pid)}
    assert not in_flight.done()
    await post(f"{url_a}/abort_request")
    assert await in_flight == (200, a.pid)


async def test_calls_in_flight_on_a_killed_engine_are_retried_elsewhere(router, start_engine):
    """These failures open the killed engine's circuit breaker, so later calls of its sessions succeed too."""
    (url_a, a), (url_b, b) = await asyncio.gather(start_engine(), start_engine())
    await asyncio.gather(router.add(url_a), router.add(url_b))
    keys = [f"session-{i}" for i in range(40)]
    pinned = [key for key in keys if await call(router, key) == (200, a.pid)][:12]
    await post(f"{url_a}/pause_generation")
    calls = [asyncio.create_task(call(router, key, tokens=2)) for key in pinned]
    await eventually(lambda: a.log.read_text().count("called for 2") == len(calls))
    os.kill(a.pid, signal.SIGKILL)
    assert {await each for each in calls} == {(200, b.pid)}
    assert {await call(router, key) for key in keys} == {(200, b.pid)}


@pytest.mark.parametrize("router", KINDS, indirect=True)
async def test_a_call_waits_for_the_first_engine(router):
    """smg answers 404 without an engine, and sglang-router 503."""
    client = EngineClient(Engines(router.url), 120.0)
    await client.start()
    try:
        generating = asyncio.create_task(client.generate(EngineRequest((1, 2), {"max_new_tokens": 4}, "session")))
        await asyncio.wait({generating}, timeout=0.3)
        assert not generating.done(), await generating
        with ScriptedEngine(["a"]) as engine:
            await router.add(engine.url)
            assert (await generating).token_ids
    finally:
        await client.close()


async def test_port_in_use_names_the_setting(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = RouterConfig(port=taken.getsockname()[1])
        for router in (Router(config, tmp_path / "router.log"), EngineDirectory(config)):
            with pytest.raises(StartupError, match=r"set router\.port"):
                await router.start()


async def test_router_forwards_the_images_of_a_call(router):
    body = {
        "rid": "r",
        "input_ids": [1, 2],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": -1,
        "image_data": ["data:image/png;base64," + "A" * 24 * 1024 * 1024, "data:image/png;base64,BBBB"],
    }
    with ScriptedEngine(["a"]) as engine:
        await router.add(engine.url)
        async with aiohttp.ClientSession() as http:
            large, kind = io.BytesIO(json.dumps(body).encode()), {"Content-Type": "application/json"}
            async with http.post(f"{router.url}/generate", data=large, headers=kind) as response:
                assert response.status == 400  # the engine's error: it got no `image_tokens`
                assert "takes no images" in await response.text()
            async with http.post(f"{router.url}/generate", json={**body, "image_data": None}) as response:
                assert (await response.json())["meta_info"]["prompt_tokens"] == 2
    assert engine.requests[0].items() >= body.items()


KEPT = {
    "rid": "r",
    "input_ids": [1, 2],
    "sampling_params": {"max_new_tokens": 1, "temperature": 0.5, "json_schema": "{}", "stop_token_ids": [7]},
    "return_logprob": True,
    "logprob_start_len": -1,
    "lora_path": "math@1",
}
DROPPED = {"structural_tag": "{}", "logit_bias": {"7": 1.0}, "stream_interval": 4}
UNKNOWN = {"return_routed_experts": True, "routed_experts_start_len": 1, "return_prompt_token_ids": True}


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("router", KINDS, indirect=True)
async def test_which_fields_of_a_call_reach_the_engine(router, stream):
    """`Engines` sends the calls that need one of the others to an engine."""
    params = {**KEPT["sampling_params"], **DROPPED}
    body = {**KEPT, **UNKNOWN, "sampling_params": params, "stream": stream}
    with ScriptedEngine(["a", "a"]) as engine:
        await router.add(engine.url)
        async with aiohttp.ClientSession() as http:
            replies = []
            for url in (engine.url, router.url):
                async with http.post(f"{url}/generate", json=body, headers={"X-SMG-Routing-Key": "s"}) as response:
                    assert response.status == 200
                    replies.append(await response.text())
    [direct, routed] = engine.requests
    assert direct.items() >= body.items()
    assert {key: routed.get(key) for key in KEPT} == KEPT
    if router._config.kind == "smg":
        assert routed.items() >= UNKNOWN.items()
        assert replies[0] == replies[1]
    else:
        assert not routed.keys() & UNKNOWN.keys()
        assert ("prompt_token_ids" in replies[0], "prompt_token_ids" in replies[1]) == (True, False)
    assert all(words in replies[1] for words in ("output_ids", "output_token_logprobs", "weight_versions"))
