"""The server that samples from a training service, as the gateway's router and a gateway call it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

import aiohttp
import numpy as np
import pytest

from builders import eventually, hang_up, until
from rollout_backend.config.results import PriceConfig
from rollout_backend.config.training_service import TrainingServiceConfig
from rollout_backend.errors import TrainingServiceError
from rollout_backend.model.gateway.engine.liveness import SamplingProbe
from rollout_backend.model.gateway.engine.protocol import SglangProtocol
from rollout_backend.training.sampling_server import SamplingServer
from rollout_backend.training.tinker import TinkerService
from tests.emulators.tinker_emulator import TinkerEmulator
from tests.emulators.tinker_training import EmulatedTrainer
from tests.emulators.tiny_learner import TabularPolicy

BODY = {"input_ids": [7, 8], "sampling_params": {"max_new_tokens": 4, "temperature": 1.0, "stop_token_ids": [9]}}


@pytest.fixture
async def emulator(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TinkerEmulator]:
    async with TinkerEmulator({"tiny": TabularPolicy(range(6))}, poll_s=0.1) as service:
        monkeypatch.setenv("TINKER_API_KEY", service.key)
        yield service


@pytest.fixture
async def server(emulator: TinkerEmulator) -> AsyncIterator[SamplingServer]:
    settings = TrainingServiceConfig(base_url=emulator.url, base_model="tiny", rank=8)
    prices = PriceConfig(prefill_million=1.0, sample_million=2.0, training_million=3.0)
    async with (
        TinkerService(settings, prices=prices) as service,
        SamplingServer(service, "/models/tiny", 600.0) as serving,
    ):
        await service.begin(None)
        model = next(iter(emulator.trained.values()))
        for version in range(2):
            path = f"tinker://{model.model_id}/sampler_weights/{version}"
            emulator.saved[path] = "tiny", model.policy.copy()
        await serving.serve(f"tinker://{model.model_id}/sampler_weights/0", 0)
        yield serving


async def loads(server: SamplingServer) -> dict[str, Any]:
    async with aiohttp.ClientSession() as http, http.get(f"{server.url}/v1/loads") as response:
        [load] = (await response.json())["loads"]
    return dict(load)


async def generate(server: SamplingServer, **more: object) -> tuple[int, dict[str, object]]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{server.url}/generate", json={**BODY, **more}) as response,
    ):
        return response.status, await response.json()


async def test_a_call_keeps_the_weights_with_which_it_began(server: SamplingServer, emulator: TinkerEmulator) -> None:
    await emulator.set_queue("paused_capacity")
    call = asyncio.ensure_future(generate(server))
    await emulator.arrived("asample", 1)
    await server.serve(next(path for path in emulator.saved if path.endswith("/1")), 1)
    await emulator.set_queue("")
    replies = [await call, await generate(server)]
    for version, (status, reply) in enumerate(replies):
        sample, meta = emulator.samples[version], reply["meta_info"]
        assert status == 200
        assert sample.model_path.endswith(f"/{version}")
        assert reply["output_ids"] == list(sample.tokens)
        assert meta["weight_versions"] == [{"version": str(version), "start": 0, "end": len(sample.tokens)}]
        assert [tuple(each[:2]) for each in meta["output_token_logprobs"]] == [
            *zip(sample.logprobs, sample.tokens, strict=True)
        ]


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"sampling_params": {"max_new_tokens": 4, "logit_bias": {"1": 2}}}, "logit_bias"),
        ({"sampling_params": {"max_new_tokens": 4, "json_schema": "{}"}}, "json_schema"),
        ({"image_data": ["data:"]}, "image_data"),
        ({"lora_path": "math"}, "lora_path"),
    ],
)
async def test_what_the_service_lacks_is_refused_by_name(
    server: SamplingServer, emulator: TinkerEmulator, body: dict[str, object], name: str
) -> None:
    status, reply = await generate(server, **body)
    assert (status, emulator.samples) == (400, [])
    assert f"does not support {name}" in reply["error"]["message"]


async def test_a_seed_fits_in_the_integer_of_every_service(server: SamplingServer, emulator: TinkerEmulator) -> None:
    for seed, sent in ((7, 7), (2**31 + 7, 7), (2**32 - 1, 2**31 - 1)):
        status, _ = await generate(server, sampling_params={**BODY["sampling_params"], "sampling_seed": seed})
        assert (status, emulator.samples[-1].params["seed"]) == (200, sent)


async def test_a_fault_of_the_service_costs_a_call_time(server: SamplingServer, emulator: TinkerEmulator) -> None:
    emulator.faults.failures += ["server", "unknown"]
    status, reply = await generate(server)
    assert (status, reply["output_ids"]) == (200, list(emulator.samples[-1].tokens))
    assert emulator.faults.failures == []
    sampled = len(emulator.samples[-1].tokens)
    usage = await server._service.usage()
    assert usage == {
        "prefill_tokens": 2,
        "sample_tokens": sampled,
        "training_tokens": 0,
        "dollars": (2 * 1.0 + sampled * 2.0) / 1e6,
    }


async def test_a_fault_that_outlasts_a_call_is_answered_503(server: SamplingServer, emulator: TinkerEmulator) -> None:
    server._model_call_s = 0.0
    emulator.faults.failures.append("server")
    assert (await generate(server))[0] == 503


async def test_an_answer_that_the_sdk_does_not_accept_is_named(
    server: SamplingServer, emulator: TinkerEmulator
) -> None:
    """As those of SkyRL 0.4.0, for SDKs newer than its own."""
    sample = emulator.handlers["asample"]

    async def without_sequences(body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: value for name, value in (await sample(body)).items() if name != "sample_sequence_ids"}

    emulator.handlers["asample"] = without_sequences
    assert server._served is not None
    with pytest.raises(TrainingServiceError, match="sample_sequence_ids"):
        await server._service.sample(server._served.sampler, [7, 8], {"max_tokens": 4})


async def test_a_sampler_that_the_service_has_forgotten_is_opened_again(
    server: SamplingServer, emulator: TinkerEmulator
) -> None:
    opened = emulator.counts["create_sampling_session"]
    emulator.forget_samplers()
    replies = await asyncio.gather(*(generate(server) for _ in range(3)))
    assert [status for status, _ in replies] == [200] * 3
    assert emulator.counts["create_sampling_session"] == opened + 1
    assert {sample.model_path.rpartition("/")[2] for sample in emulator.samples} == {"0"}


async def test_weights_of_a_model_that_the_service_has_lost_are_saved_again(
    server: SamplingServer, emulator: TinkerEmulator
) -> None:
    EmulatedTrainer(emulator)
    saved = await server._service.save("step-2", keep=True)
    await server.serve(saved.sampler, 2)
    emulator.faults.lost.add(saved.sampler)
    replies = await asyncio.gather(*(generate(server) for _ in range(3)))
    assert [status for status, _ in replies] == [200] * 3
    assert {reply["meta_info"]["weight_version"] for _, reply in replies} == {"2"}
    [path] = {sample.model_path for sample in emulator.samples} - {saved.sampler}
    assert path != saved.sampler
    # SkyRL's paths are shorter.
    short = saved.sampler.replace("sampler_weights/", "")
    emulator.saved[short] = emulator.saved[saved.sampler]
    await server.serve(short, 3)
    emulator.faults.lost.add(short)
    status, _ = await generate(server)
    assert (status, emulator.samples[-1].model_path != short) == (200, True)
    np.testing.assert_array_equal(*(emulator.saved[each][1].logits for each in (path, saved.sampler)))


async def test_a_call_that_waits_at_the_service_is_not_lost(server: SamplingServer, emulator: TinkerEmulator) -> None:
    await emulator.set_queue("paused_capacity")
    call = asyncio.ensure_future(generate(server))
    await emulator.arrived("asample", 1)
    probe = SamplingProbe(server.url, SglangProtocol())
    async with aiohttp.ClientSession() as http:
        # A gateway repeats a call of an engine that answers the probe.
        assert await probe.state(http, 0.2) == "busy"
        load = await loads(server)
        assert load["num_running_reqs"] == 1 < load["max_running_requests"]
        await emulator.set_queue("")
        assert (await call)[0] == 200
        assert await probe.state(http, 60) == "busy"
        assert await probe.state(http, 60) == "sampling"
    assert len(emulator.samples) == 1


async def test_a_call_whose_client_hangs_up_is_counted_and_not_repeated(
    server: SamplingServer, emulator: TinkerEmulator
) -> None:
    await emulator.set_queue("paused_capacity")
    calls = [asyncio.ensure_future(generate(server)) for _ in range(3)]
    await emulator.arrived("asample", 3)
    for call in calls[:2]:
        call.cancel()
    await eventually(lambda: server._given_up["calls"] == 2)
    await emulator.set_queue("")
    assert (await calls[2])[0] == 200
    await eventually(lambda: not server._unread)
    assert emulator.counts["asample"] == 3
    assert (await loads(server))["given_up"] == {"calls": 2, "prompt_tokens": 4, "limit_tokens": 8}


async def test_a_gateway_behind_a_router_knows_the_calls_that_were_given_up(
    server: SamplingServer, emulator: TinkerEmulator, serve: Any, behind_router: Any
) -> None:
    await emulator.set_queue("paused_capacity")
    # The router and the gateway call this event loop while they start.
    url = await asyncio.to_thread(behind_router, server.url)
    gateway = await asyncio.to_thread(lambda: serve(url, load_poll_s=5.0))
    await asyncio.to_thread(until, lambda: [load.is_service for load in gateway.stats().engines.values()] == [True])
    call = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    arrived = partial(until, lambda: emulator.counts["asample"])
    await asyncio.to_thread(hang_up, gateway.url, gateway.key(), call, lambda: arrived() is None)
    await eventually(lambda: server._given_up["calls"])
    # The counts are read for the report, and not only once in 5 s.
    found = (await asyncio.to_thread(gateway.stats)).engine_given_up
    assert found.pop("prompt_tokens") > 5
    assert found == {"calls": 1, "limit_tokens": 8}


async def test_a_call_with_the_prompt_of_a_probe_is_sampled(server: SamplingServer, emulator: TinkerEmulator) -> None:
    for params in ({"max_new_tokens": 1, "temperature": 1.0}, {"max_new_tokens": 2, "temperature": 0}):
        status, reply = await generate(server, input_ids=[0], sampling_params=params)
        assert (status, reply["output_ids"]) == (200, list(emulator.samples[-1].tokens))
    assert len(emulator.samples) == 2


async def test_probes_sample_nothing_and_log_nothing(
    server: SamplingServer, emulator: TinkerEmulator, caplog: pytest.LogCaptureFixture
) -> None:
    status, _ = await generate(server, input_ids=[0], sampling_params={"max_new_tokens": 1, "temperature": 0})
    assert (status, emulator.samples) == (200, [])
    host, port = server.url.removeprefix("http://").split(":")
    with caplog.at_level(logging.DEBUG, "rollout_backend"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert b"400" in await reader.readline()
        writer.close()
    assert not caplog.records
