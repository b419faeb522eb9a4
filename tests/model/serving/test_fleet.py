import asyncio
import os
import signal
import socket

import pytest

from builders import eventually, generate, is_running, kinds, post, skip
from rollout_backend.errors import StartupError
from rollout_backend.model.serving.engine import is_healthy, is_responding
from rollout_backend.model.serving.engine_fleet import EngineFleet
from rollout_backend.model.serving.server_process import free_port
from rollout_backend.model.serving.supervisor import Probing

ROUTERS = ["sglang-router", pytest.param("smg", marks=pytest.mark.slow)]
OFTEN = Probing(interval_s=0.1, timeout_s=120.0, failures=2)


@pytest.fixture
def make_fleet(make_config, fake_engines, tmp_path):
    """A fleet of fake engines of these modes, its events, and every engine that it made."""

    def make(*modes, then="healthy", probing=None, **sections):
        config, events = make_config(**sections), []
        fleet = EngineFleet(config, tmp_path, events.append, probing=probing)
        return fleet, events, fake_engines(fleet, config, *modes, then=then)

    return make


async def routed_to(fleet, *urls):
    return set(await fleet._router.workers()) == set(urls)


async def served_by(fleet, key="session"):
    """Return the status of a call, and the process that answered it."""
    status, answer = await generate(fleet.router_url, key)
    return status, answer.get("pid")


async def test_fleet_serves_and_leaves_no_process(make_fleet):
    fleet, events, engines = make_fleet(serving={"servers": 2})
    async with fleet:
        pids = [engine.pid for engine in engines]
        assert [event.kind for event in events] == ["started"] * 3
        assert set(fleet.engine_urls) == {engine.url for engine in engines}
        assert [(state.name, state.serving, state.restarts) for state in fleet.snapshot()] == [
            ("router", True, 0),
            ("engine-0", True, 0),
            ("engine-1", True, 0),
        ]
        served = {(await served_by(fleet, f"session-{i}"))[1] for i in range(30)}
        assert served == set(pids)
        router = fleet._router.pid
    assert not any(is_running(pid) for pid in [*pids, router])
    assert fleet.engine_urls == ()
    await fleet.stop()  # idempotent


async def test_killed_engine_is_restarted_and_calls_succeed_meanwhile(make_fleet):
    fleet, events, engines = make_fleet(serving={"servers": 2}, router={})
    async with fleet:
        keys = [f"session-{i}" for i in range(30)]
        await asyncio.gather(*(served_by(fleet, key) for key in keys))  # pins each to an engine
        os.kill(engines[0].pid, signal.SIGKILL)
        await eventually(lambda: "died" in kinds(events, "engine-0") and engines[0].url not in fleet.engine_urls)
        assert {status for status, _ in [await served_by(fleet, key) for key in keys]} == {200}
        await eventually(lambda: kinds(events, "engine-0") == ["started", "died", "restarted"])
        died = next(event for event in events if event.kind == "died")
        assert "code -9" in died.detail
        assert "engines.log" in died.detail
        assert len(engines) == 3
        assert set(await fleet._router.workers()) == {engines[1].url, engines[2].url} == set(fleet.engine_urls)
        served = {(await served_by(fleet, f"new-{i}"))[1] for i in range(30)}
        assert served == {engines[1].pid, engines[2].pid}
        assert kinds(events, "engine-1") == ["started"]
        assert [state.restarts for state in fleet.snapshot()] == [0, 1, 0]


async def test_an_engine_that_samples_nothing_is_restarted_although_its_server_answers(make_fleet):
    often = Probing(interval_s=0.1, timeout_s=120.0, failures=2, sample_every_s=0.0)
    fleet, events, engines = make_fleet(probing=often, serving={"servers": 1}, timeouts={"model_call_s": 10})
    async with fleet:
        await post(f"{engines[0].url}/pause_generation")
        await eventually(lambda: kinds(events, "engine-0") == ["started", "died", "restarted"])
        assert await served_by(fleet) == (200, engines[1].pid)


async def test_silent_server_does_not_respond():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not await is_responding(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.1)


@pytest.mark.parametrize("kind", ROUTERS)
async def test_killed_router_restarts_with_all_engines(make_fleet, kind):
    fleet, events, engines = make_fleet(serving={"servers": 2}, router={"kind": kind})
    async with fleet:
        url = fleet.router_url
        os.kill(fleet._router.pid, signal.SIGKILL)
        await eventually(lambda: kinds(events, "router") == ["started", "died", "restarted"])
        assert fleet.router_url == url
        assert set(await fleet._router.workers()) == {engine.url for engine in engines}
        assert (await served_by(fleet))[0] == 200
        assert kinds(events, "engine-0") == ["started"]


async def test_an_engine_that_the_router_does_not_take_again_is_restarted(make_fleet, monkeypatch):
    fleet, events, engines = make_fleet()
    async with fleet:
        refused, add = [engines[0].url], fleet._router.add

        async def refuse(url):
            if url in refused:
                refused.remove(url)
                raise StartupError("the router did not take it")
            await add(url)

        monkeypatch.setattr(fleet._router, "add", refuse)
        await fleet.pause()
        await fleet.resume()
        assert not any(engine._unfit.is_set() for engine in fleet.routing.engines), "the second attempt succeeded"
        refused += [engines[0].url] * 2
        await fleet.pause()
        await fleet.resume()
        await eventually(lambda: kinds(events, "engine-0") == ["started", "died", "restarted"])
        assert next(event.detail for event in events if event.kind == "died") == "the router did not take it"
        assert await routed_to(fleet, engines[1].url)


async def test_start_fails_if_no_engine_starts(make_fleet):
    fleet, events, engines = make_fleet(then="broken", serving={"servers": 2, "max_restarts": 0})
    message = r"engine-0 ended with code 1 before it was up[\s\S]*made of cheese[\s\S]*other 1 engines failed"
    with pytest.raises(StartupError, match=message):
        await fleet.start()
    assert "started" not in [*kinds(events, "engine-0"), *kinds(events, "engine-1")]
    assert not any(is_running(pid) for engine in engines if (pid := engine.pid))
    assert not fleet._router.running


async def test_engine_that_does_not_start_does_not_stop_the_others(make_fleet):
    fleet, events, engines = make_fleet("healthy", then="broken", serving={"servers": 3, "max_restarts": 1})
    async with fleet:
        assert fleet.engine_urls == (engines[0].url,)
        assert await served_by(fleet) == (200, engines[0].pid)
        await eventually(lambda: [event.kind for event in events].count("gave_up") == 2)
        assert kinds(events, "engine-2") == ["died", "died", "gave_up"]
        up_at = [(event.server, event.kind) for event in events].index(("engine-0", "started"))
        for i, event in enumerate(events):
            up = int(i > up_at)  # engine-0 may still be starting
            limit = f"after 1 restarts within 3600 s (serving.max_restarts); {up} of 3 engines"
            assert event.kind != "gave_up" or limit in event.detail
        assert not fleet._supervisors._failed.is_set()
        os.kill(engines[0].pid, signal.SIGKILL)  # the last one; its replacement is broken too
        with pytest.raises(StartupError, match=r"gone after 1 restarts.*no other engine is left[\s\S]*cheese"):
            await asyncio.wait_for(fleet.failed(), 120)


async def test_engine_out_of_restarts_restarts_when_the_window_allows_it(make_fleet):
    fleet, events, _ = make_fleet("healthy", "broken", "broken", serving={"servers": 2, "max_restarts": 1})
    async with fleet:
        await eventually(lambda: "gave_up" in kinds(events, "engine-1"))
        skip(3600)  # serving.restart_window_s
        await eventually(lambda: "restarted" in kinds(events, "engine-1"))
        assert kinds(events, "engine-1") == ["died", "died", "gave_up", "restarted"]
        assert len(fleet.engine_urls) == 2


async def test_folder_without_a_model_is_refused(make_fleet, tmp_path):
    fleet, _, _ = make_fleet(model={"path": tmp_path / "nowhere"})
    with pytest.raises(StartupError, match=r"nowhere is no model folder.*set model\.path"):
        await fleet.start()
    assert not fleet._router.running


async def test_cancelled_start_leaves_no_process(make_fleet):
    fleet, _, engines = make_fleet(then="sick")
    starting = asyncio.create_task(fleet.start())
    await eventually(lambda: bool(engines) and engines[0].pid is not None)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not is_running(engines[0].pid)
    assert not fleet._router.running


async def test_external_engines_are_registered_and_left_running(make_config, start_engine, tmp_path):
    (url_a, _), (url_b, b) = await asyncio.gather(start_engine(), start_engine())
    config = make_config(serving={"kind": "external", "urls": [url_a + "/", url_b], "max_restarts": 1})
    events = []
    async with EngineFleet(config, tmp_path, events.append, probing=OFTEN) as fleet:
        assert set(await fleet._router.workers()) == {url_a, url_b}
        for times in (1, 2):  # an engine that answers again was not restarted
            await post(f"{url_a}/fail_probes", {"fail": True})
            await eventually(lambda: kinds(events, "engine-0").count("died") == times)  # noqa: B023
            await eventually(lambda: routed_to(fleet, url_b))
            assert fleet.engine_urls == (url_b,)
            assert await served_by(fleet) == (200, b.pid)
            await post(f"{url_a}/fail_probes", {"fail": False})
            await eventually(lambda: kinds(events, "engine-0").count("restarted") == times)  # noqa: B023
            # It is also reported as waiting if the outage took more than 5 s.
            known = [kind for kind in kinds(events, "engine-0") if kind != "waiting"]
            assert known == ["started", *["died", "restarted"] * times]
            assert set(await fleet._router.workers()) == {url_a, url_b}
    assert await is_healthy(url_a)
    assert await is_healthy(url_b)


@pytest.mark.slow
async def test_a_run_begins_with_the_engines_that_answer_and_the_others_join(make_config, start_engine, tmp_path):
    url, _ = await start_engine()
    port = free_port()
    events, late = [], f"http://127.0.0.1:{port}"
    config = make_config(serving={"kind": "external", "urls": [url, late], "min_servers": 1})
    async with EngineFleet(config, tmp_path, events.append) as fleet:
        assert fleet.engine_urls == (url,)
        assert [each.waiting_for for each in fleet.snapshot()] == ["", "", f"waits for {late} to answer"]
        await start_engine(port)
        await eventually(lambda: kinds(events, "engine-1") == ["waiting", "started"])
        assert set(fleet.engine_urls) == {url, late}
        assert not any(each.waiting_for for each in fleet.snapshot())


@pytest.mark.slow
async def test_an_engine_that_is_lost_while_others_start_is_awaited_again(make_config, start_engine, tmp_path):
    url, _ = await start_engine()
    port = free_port()
    events, late = [], f"http://127.0.0.1:{port}"
    fleet = EngineFleet(
        make_config(serving={"kind": "external", "urls": [url, late], "min_servers": 2}),
        tmp_path, events.append, probing=OFTEN,
    )  # fmt: skip
    starting = asyncio.create_task(fleet.start())
    await eventually(lambda: kinds(events, "engine-0") == ["started"])
    await post(f"{url}/fail_probes", {"fail": True})
    await eventually(lambda: kinds(events, "engine-0") == ["started", "died"])
    await post(f"{url}/fail_probes", {"fail": False})
    await eventually(lambda: kinds(events, "engine-0")[-1] == "restarted")
    assert not starting.done()
    await start_engine(port)
    await starting
    assert set(fleet.engine_urls) == {url, late}
    await fleet.stop()


async def test_follow_adds_and_removes_external_engines(make_config, start_engine, tmp_path):
    (first, _), (second, _) = await asyncio.gather(start_engine(), start_engine())
    events = []
    config = make_config(serving={"kind": "external", "urls": [first]})
    async with EngineFleet(config, tmp_path, events.append) as fleet:
        await fleet.follow([first, second])
        assert fleet.engine_urls == (first, second)
        await fleet.follow([second])
        assert fleet.engine_urls == (second,)
        assert set(await fleet._router.workers()) == {second}
        await fleet.follow([second])
        following = asyncio.create_task(fleet.follow([second, "http://127.0.0.1:9", first]))
        await eventually(lambda: fleet.engine_urls == (second, first))  # an unreachable one delays no other
        following.cancel()
    seen = [(event.server, event.kind) for event in events if event.kind in ("started", "left")]
    assert seen[-3:] == [("engine-1", "started"), ("engine-0", "left"), ("engine-3", "started")]


async def test_unreachable_external_engine_is_refused(make_config, tmp_path):
    config = make_config(serving={"kind": "external", "urls": ["http://127.0.0.1:9"], "startup_timeout_s": 0.5})
    with pytest.raises(StartupError, match=r"correct serving\.urls"):
        await EngineFleet(config, tmp_path).start()


# --- servers that a trainer puts to sleep -----------------------------------------------------------------


@pytest.fixture(params=ROUTERS)
async def sleeper(request, make_config, start_engine, tmp_path):
    """A fleet with one external engine that is probed often, the engine, and the events."""
    url, process = await start_engine()
    config = make_config(serving={"kind": "external", "urls": [url]}, router={"kind": request.param})
    events = []
    async with EngineFleet(config, tmp_path, events.append, probing=OFTEN) as fleet:
        yield fleet, url, process, events


async def test_probes_do_not_generate_on_a_sleeping_server(sleeper):
    """verl's servers answer `/health` by generating a token, which kills one whose memory is released."""
    _, url, process, events = sleeper
    assert await post(f"{url}/release_memory_occupation") == 200

    def probed():
        log = process.log.read_text()
        return log.count("/model_info router") > 1 and log.count("/model_info fleet") > 3

    await eventually(lambda: not process.running or probed())
    assert process.running, process.log_tail()
    assert kinds(events, "engine-0") == ["started"]


async def test_server_is_idle_when_it_sleeps_and_stays_alive(sleeper):
    fleet, url, process, events = sleeper
    tokens = 10**6
    calls = [
        asyncio.create_task(post(f"{url}/generate", {"sampling_params": {"max_new_tokens": tokens}})) for _ in "ab"
    ]
    await eventually(
        lambda: process.log.read_text().count(f"generates {tokens}") == len(calls)
    )  # `/health` generates too
    await fleet.pause()
    assert [state.paused for state in fleet.snapshot()] == [False, True]
    assert await asyncio.gather(*calls) == [200, 200]  # aborted
    assert await post(f"{url}/release_memory_occupation") == 200
    straggler = asyncio.create_task(served_by(fleet))
    await eventually(lambda: "called for 1\n" in process.log.read_text())
    assert not straggler.done(), "a sleeping server generated"
    assert await post(f"{url}/resume_memory_occupation") == 200
    await fleet.resume()
    assert (await straggler)[0] == 200
    assert process.running, process.log_tail()
    assert kinds(events, "engine-0") == ["started"]


@pytest.mark.slow
async def test_router_restarted_while_servers_sleep_gets_them_when_they_wake(sleeper):
    """Both routers request `/health` from a new engine and ignore `--health-check-endpoint`."""
    fleet, url, process, events = sleeper
    await fleet.pause()
    assert await post(f"{url}/release_memory_occupation") == 200
    os.kill(fleet._router.pid, signal.SIGKILL)
    await eventually(lambda: kinds(events, "router") == ["started", "died", "restarted"])
    assert await fleet._router.workers() == {}
    assert await post(f"{url}/resume_memory_occupation") == 200
    await fleet.resume()
    assert await served_by(fleet) == (200, process.pid)
    assert kinds(events, "engine-0") == ["started"]


async def test_sleeping_server_that_does_not_answer_counts_no_restart(sleeper):
    """Like a server that moves gigabytes in the process that answers."""
    fleet, url, process, events = sleeper
    await fleet.pause()
    await post(f"{url}/fail_probes", {"fail": True})
    [engine], probes = fleet._engines, []
    is_responding = engine.is_responding

    async def count():
        probes.append(await is_responding())
        return probes[-1]

    engine.is_responding = count
    await eventually(lambda: len(probes) > OFTEN.failures)
    await post(f"{url}/fail_probes", {"fail": False})
    await fleet.resume()

    async def generates():
        return await served_by(fleet) == (200, process.pid)

    await eventually(generates)  # once the router's own health check has succeeded again
    assert [state.restarts for state in fleet.snapshot()] == [0, 0]
    assert kinds(events, "engine-0") == ["started"]
