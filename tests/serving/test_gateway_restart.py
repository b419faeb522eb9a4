"""A gateway that dies in the middle of its sessions: real processes, killed, and real clients."""

import asyncio
import os
import signal
import socket
import threading
import time

import openai
import pytest

from agent_wrapper.trajectory import fetch_trajectory
from rollout_backend.config import RolloutConfig
from rollout_backend.core.seal import Sealer
from rollout_backend.errors import ServingError, StartupError
from rollout_backend.gateway.sharding import shard_of
from rollout_backend.local.scripted import BYTE_MODEL, LOGPROB, ScriptedEngine
from rollout_backend.serving.gateway_fleet import GatewayFleet
from rollout_backend.serving.run_secret import key_secret

SECRET = "the secret of this run " * 2


def config(**sections) -> RolloutConfig:
    return RolloutConfig.parse(
        {
            "model": {"path": BYTE_MODEL, "name": "m", "renderer": "chatml"},
            "storage": {"bucket": "bucket"},
            "runtime": {"kind": "http", "url": "http://127.0.0.1:9"},
            **sections,
        }
    )


def fleet_of(engine, tmp_path, events=None, run_id="run", **sections) -> GatewayFleet:
    return GatewayFleet(
        config(**sections),
        engine.url,
        tmp_path / "logs",
        key_secret(SECRET, run_id),
        seal_secret=SECRET,
        journals=tmp_path / run_id / "gateway",
        on_event=(lambda event: events.append((event.server, event.kind))) if events is not None else lambda _: None,
    )


def client_of(endpoint, retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=retries)


async def say(client, messages: list[dict], text: str) -> str:
    messages.append({"role": "user", "content": text})
    reply = await client.chat.completions.create(model="m", messages=messages)
    messages.append(reply.choices[0].message.model_dump(exclude_none=True))
    return reply.choices[0].message.content


async def kill(fleet: GatewayFleet, shard: int = 0) -> None:
    process = fleet._shards[shard]._process
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()


async def until(condition, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_a_session_survives_the_death_of_its_gateway_in_the_middle_of_a_call(tmp_path, claims):
    asked, go = threading.Semaphore(0), threading.Event()
    replies = iter(["one", "lost with its gateway", "two", "three"])

    def answer(_: str) -> str:
        reply = next(replies)
        asked.release()
        if reply.startswith("lost"):
            go.wait(30)
        return reply

    events: list[tuple[str, str]] = []
    with ScriptedEngine(answer) as engine:
        fleet = fleet_of(engine, tmp_path, events)
        await fleet.start()
        watching = asyncio.create_task(fleet.failed())
        try:
            endpoint = fleet.endpoint(claims())
            messages: list[dict] = []
            async with client_of(endpoint, retries=12) as client:
                assert await say(client, messages, "Begin.") == "one"
                assert asked.acquire(timeout=10)
                second = asyncio.create_task(say(client, messages, "Go on."))
                assert await asyncio.to_thread(asked.acquire, timeout=10)
                await kill(fleet)
                assert await second == "two"
                await kill(fleet)
                assert await say(client, messages, "And on.") == "three"
            assert fleet.endpoint(claims()).base_url == endpoint.base_url
            trajectory = await fetch_trajectory(endpoint, 20)
            await fleet.revoke(["s"])
            assert not watching.done()
        finally:
            go.set()
            watching.cancel()
            await fleet.stop()
    [segment] = trajectory.segments
    sampled = [token for token, given in zip(segment.token_ids, segment.response_mask, strict=True) if given]
    assert engine.tokenizer.decode(sampled, skip_special_tokens=True) == "onetwothree"
    assert {logprob for logprob, given in zip(segment.logprobs, segment.response_mask, strict=True) if given} == {
        LOGPROB
    }
    assert [message["content"] for message in segment.messages[1::2]] == ["one", "two", "three"]
    assert trajectory.unanswered_calls == 0
    assert trajectory.seal == Sealer(SECRET).seal(trajectory, claims()).seal
    assert events == [("gateway", "died"), ("gateway", "restarted")] * 2
    assert list((tmp_path / "run" / "gateway" / "0-of-1" / "sessions").iterdir()) == []


async def test_one_that_dies_again_and_again_ends_the_run(tmp_path):
    events: list[tuple[str, str]] = []
    with ScriptedEngine(["one"]) as engine:
        fleet = fleet_of(engine, tmp_path, events, gateway={"processes": 2}, serving={"max_restarts": 1})
        await fleet.start()
        watching = asyncio.create_task(fleet.failed())
        try:
            await kill(fleet, 1)
            await until(lambda: ("gateway-1", "restarted") in events)
            await kill(fleet, 1)
            with pytest.raises(StartupError, match=r"serving\.max_restarts.*gateway 1 of 2 ended with code -9"):
                await asyncio.wait_for(watching, 30)
            other = next(name for name in map(str, range(100)) if shard_of(name, 2) == 1)
            with pytest.raises(ServingError, match="does not answer"):
                await fleet.revoke([other])
        finally:
            watching.cancel()
            await fleet.stop()
    assert events[-1] == ("gateway-1", "gave_up")


async def test_a_trainer_started_again_finds_its_sessions_at_the_same_address(tmp_path, claims):
    with ScriptedEngine(lambda prompt: str(prompt.count("user"))) as engine:
        first = fleet_of(engine, tmp_path)
        await first.start()
        endpoint, messages = first.endpoint(claims()), []
        before = first.identity
        async with client_of(endpoint) as client:
            await say(client, messages, "Begin.")
        await first.stop()
        second = fleet_of(engine, tmp_path)
        await second.start()
        try:
            assert second.identity == before
            async with client_of(endpoint) as client:
                with pytest.raises(
                    openai.InternalServerError, match="retry later"
                ):  # other weights may be served now
                    await say(client, list(messages), "Go on.")
                await second.adopt(["s"])
                await say(client, messages, "Go on.")
                await kill(second)
            async with client_of(endpoint, retries=12) as client:
                await say(client, messages, "And on.")
            [segment] = (await fetch_trajectory(endpoint, 10)).segments
            assert len(segment.turns) == 3
        finally:
            await second.stop()
        other = fleet_of(engine, tmp_path, run_id="another")  # with the same gateway.secret
        await other.start()
        try:
            assert other.identity != before
            strange = endpoint.model_copy(update={"base_url": f"{other.urls[0]}/v1"})
            async with client_of(strange) as client:
                with pytest.raises(openai.AuthenticationError):
                    await say(client, messages, "Who are you?")
        finally:
            await other.stop()


async def test_where_the_port_is_taken_it_is_another_gateway(tmp_path):
    with ScriptedEngine(["one"]) as engine:
        first = fleet_of(engine, tmp_path)
        await first.start()
        before, port = first.identity, int(first.urls[0].rpartition(":")[2])
        await first.stop()
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", port))
            taken.listen()
            second = fleet_of(engine, tmp_path)
            await second.start()
            try:
                assert second.identity != before
            finally:
                await second.stop()
