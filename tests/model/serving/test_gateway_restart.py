"""Gateways that are killed in the middle of sessions: real processes and real clients."""

import asyncio
import os
import signal
import socket
from unittest.mock import Mock

import openai
import pytest

from agent_wrapper.shared.trajectory import fetch_trajectory
from builders import complete, eventually, report, session_of, user
from rollout_backend.core.seal import SealClaims, Sealer
from rollout_backend.core.session_key import read_claims, shard_of
from rollout_backend.errors import ServingError, StartupError
from rollout_backend.model.gateway.sessions import journal_folder
from rollout_backend.model.serving.gateway_fleet import GatewayFleet
from rollout_backend.model.serving.run_secret import key_secret
from rollout_backend.model.serving.supervisor import Probing
from rollout_backend.workbench.local.scripted import LOGPROB, ScriptedEngine

SECRET = "the secret of this run " * 2


@pytest.fixture
def start(start_fleet, tmp_path):
    """Start a fleet with journals. `events` gets what happens to its gateways."""

    async def start(engine, events=None, probing=None, **sections) -> GatewayFleet:
        seen = [] if events is None else events
        more = {
            "seal_secret": SECRET,
            "journals": tmp_path / "run" / "gateway",
            "probing": probing,
            "on_event": lambda event: seen.append((event.server, event.kind)),
        }
        return await start_fleet(engine, tmp_path / "logs", key_secret(SECRET, "run"), more=more, **sections)

    return start


async def say(endpoint, messages: list[dict], text: str, retries: int = 0) -> str:
    """Continue the conversation; return the reply."""
    reply = await complete(endpoint, *messages, text, retries=retries)
    messages += [user(text), {"role": "assistant", "content": reply}]
    return reply


async def kill(fleet: GatewayFleet, shard: int = 0) -> None:
    process = fleet._shards[shard]._process
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()


async def test_a_session_survives_deaths_of_its_gateway_and_a_restart_of_its_trainer(start, held, tmp_path, claims):
    replies = iter(["one", "", "two", "three", "four"])
    events: list[tuple[str, str]] = []
    restart = [("gateway", "died"), ("gateway", "restarted")]
    with ScriptedEngine(lambda prompt: next(replies) or held(prompt)) as engine:
        first = await start(engine, events)
        watching = asyncio.create_task(first.failed())
        try:
            endpoint = first.endpoint(claims())
            messages: list[dict] = []
            assert await say(endpoint, messages, "Begin.") == "one"
            second = asyncio.create_task(say(endpoint, messages, "And then?", retries=12))
            assert await asyncio.to_thread(held.asked.acquire, timeout=120)
            await kill(first)
            assert await second == "two"
            await eventually(lambda: events == restart)  # the new gateway may answer before it counts as started
            assert not watching.done()
        finally:
            held.go.set()
            watching.cancel()
            await first.stop()
        fleet = await start(engine, events)
        assert fleet.identity == first.identity
        assert fleet.endpoint(claims()).base_url == endpoint.base_url
        with pytest.raises(openai.InternalServerError, match="retry later"):  # other weights may be served now
            await say(endpoint, messages, "And then?")
        await fleet.adopt(["s"])
        assert await say(endpoint, messages, "And then?") == "three"
        await kill(fleet)
        assert await say(endpoint, messages, "And then?", retries=12) == "four"
        await eventually(lambda: events == restart * 2)
        trajectory = await fetch_trajectory(endpoint, 120)
        await fleet.revoke(["s"])
        await fleet.stop()
    [segment] = trajectory.segments
    given = zip(segment.token_ids, segment.logprobs, segment.response_mask, strict=True)
    sampled = [(token, logprob) for token, logprob, mask in given if mask]
    text = engine.tokenizer.decode([token for token, _ in sampled], skip_special_tokens=True)
    assert (text, {logprob for _, logprob in sampled}) == ("onetwothreefour", {LOGPROB})
    assert [message["content"] for message in segment.messages[1::2]] == ["one", "two", "three", "four"]
    assert trajectory.unanswered_calls == 0
    sealed = read_claims(trajectory.seal or "", SealClaims)
    assert trajectory.seal == Sealer(SECRET).seal(trajectory, claims(), sealed.first_call_s).seal
    assert list((tmp_path / "run" / "gateway" / "0-of-1" / "sessions").iterdir()) == []


@pytest.mark.slow
async def test_a_gateway_out_of_restarts_ends_the_run(start):
    events: list[tuple[str, str]] = []
    with ScriptedEngine(["one"]) as engine:
        fleet = await start(engine, events, gateway={"processes": 2}, serving={"max_restarts": 1})
        watching = asyncio.create_task(fleet.failed())
        await kill(fleet, 1)
        await eventually(lambda: ("gateway-1", "restarted") in events)
        await kill(fleet, 1)
        with pytest.raises(StartupError, match=r"serving\.max_restarts.*gateway 1 of 2 ended with code -9"):
            await asyncio.wait_for(watching, 120)
        other = next(name for name in map(str, range(100)) if shard_of(name, 2) == 1)
        with pytest.raises(ServingError, match="does not answer"):
            await fleet.revoke([other])
    assert events[-1] == ("gateway-1", "gave_up")


@pytest.mark.slow
async def test_if_its_port_is_taken_a_restarted_gateway_has_another_identity(start):
    with ScriptedEngine(["one"]) as engine:
        first = await start(engine)
        before, port = first.identity, int(first.urls[0].rpartition(":")[2])
        await first.stop()
        with socket.create_server(("127.0.0.1", port)):
            assert (await start(engine)).identity != before


async def test_a_gateway_whose_disk_does_not_answer_restarts_without_a_journal(start, claims, monkeypatch):
    events: list[tuple[str, str]] = []
    with ScriptedEngine(["one"]) as engine:
        fleet = await start(engine, events)
        earlier, identity = fleet.endpoint(claims("earlier")), fleet.identity
        assert await say(earlier, [], "Begin.") == "one"
        monkeypatch.setattr(journal_folder, "prepare", Mock(side_effect=TimeoutError))
        await kill(fleet)
        await eventually(lambda: events == [("gateway", "died"), ("gateway", "restarted")])
        with pytest.raises(openai.APIStatusError, match="lost with the journal"):
            await say(earlier, [], "And then?")
        assert await say(fleet.endpoint(claims("new")), [], "Begin.") == "one"
        assert fleet.identity != identity
        assert (await fleet.stats()).unjournaled == 1


@pytest.mark.slow
async def test_a_gateway_that_hangs_is_restarted_and_its_session_continues(start, claims):
    events: list[tuple[str, str]] = []
    with ScriptedEngine(["one", "two"]) as engine:
        fleet = await start(engine, events, probing=Probing(interval_s=0.05, timeout_s=3.0, failures=2))
        endpoint, messages = fleet.endpoint(claims()), []
        assert await say(endpoint, messages, "Begin.") == "one"
        os.kill(fleet._shards[0]._process.pid, signal.SIGSTOP)
        await eventually(lambda: events == [("gateway", "died"), ("gateway", "restarted")])
        await fleet.resume()
        assert await say(endpoint, messages, "And then?", retries=12) == "two"


async def test_a_gateway_that_restarts_keeps_the_reports_of_agents_for_another_trainer(start, claims):
    """Agents for SageMaker's job runtime, of two gateway processes."""
    sessions = [session_of(0), session_of(1)]
    with ScriptedEngine(["one"]) as engine:
        first = await start(engine, gateway={"processes": 2})
        endpoints = [first.endpoint(claims(session)) for session in sessions]
        for endpoint in endpoints:
            assert await complete(endpoint) == "one"
            assert await report(endpoint, "complete-rollout") == 200
        assert await report(endpoints[0], "update-reward", Rewards=[0.5]) == 200
        other = endpoints[1].model_copy(update={"base_url": endpoints[0].base_url})
        assert await report(other, "update-reward", Rewards=[0.5]) == 421
        assert sorted(await first.reports()) == sorted(sessions)
        await kill(first, 0)
        assert (await first.reports()).keys() == {sessions[1]}
        with pytest.raises(ServingError):
            await first.report_of(sessions[0])
        await first.stop()
        fleet = await start(engine, gateway={"processes": 2})
        assert sorted(await fleet.reports()) == sorted(sessions)
        # Agents of the earlier trainer report before it is known whether they are adopted.
        assert await report(endpoints[1], "update-reward", Rewards=[1.0]) == 200
        found = [await fleet.report_of(session) for session in sessions]
        assert [(each["status"], each["rewards"]) for each in found] == [("ready", [0.5]), ("ready", [1.0])]
        assert len((await fetch_trajectory(endpoints[0], 120)).segments) == 1
        await fleet.revoke(sessions)
        assert [await fleet.report_of(session) for session in sessions] == [None, None]
        assert await fleet.reports() == {}
        await fleet.stop()
