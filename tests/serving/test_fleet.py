import asyncio
import os
import signal
import socket

import aiohttp
import pytest

from rollout_backend.errors import ConfigError, StartupError
from rollout_backend.serving.engine import LocalEngine, is_healthy
from rollout_backend.serving.fleet import Fleet, Probing

QUICK = Probing(interval_s=0.1, timeout_s=0.5, failures=2)


@pytest.fixture
def make_fleet(make_config, fake_command, tmp_path):
    """A fleet of fake engines, its events, and every engine it ever made."""

    def make(mode=lambda started: "healthy", probing=None, **sections):
        config, command = make_config(**sections), fake_command(mode)
        events, engines = [], []

        def make_engine(i):
            log = tmp_path / f"engine-{i}.log"
            engines.append(LocalEngine(f"engine-{i}", config.model, config.serving, log, command=command))
            return engines[-1]

        fleet = Fleet(config, tmp_path, events.append, make_engine=make_engine, probing=probing)
        return fleet, events, engines

    return make


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def kinds(events, server):
    return [event.kind for event in events if event.server == server]


async def generate(fleet, key="session"):
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            f"{fleet.router_url}/generate", json={"input_ids": [1]}, headers={"X-SMG-Routing-Key": key}
        ) as reply,
    ):
        return reply.status, (await reply.json()).get("pid")


async def test_it_serves_and_leaves_nothing_behind(make_fleet):
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
        served = {(await generate(fleet, f"session-{i}"))[1] for i in range(30)}
        assert served == set(pids)
        router = fleet._router.pid
    assert not any(alive(pid) for pid in [*pids, router])
    assert fleet.engine_urls == ()
    await fleet.stop()  # again


async def test_an_engine_that_is_killed_comes_back(make_fleet, until):
    fleet, events, engines = make_fleet(serving={"servers": 2})
    async with fleet:
        os.kill(engines[0].pid, signal.SIGKILL)
        await until(lambda: kinds(events, "engine-0") == ["started", "died", "restarted"])
        died = next(event for event in events if event.kind == "died")
        assert "code -9" in died.detail
        assert "engine-0.log" in died.detail
        assert len(engines) == 3
        assert set(await fleet._router.workers()) == {engines[1].url, engines[2].url} == set(fleet.engine_urls)
        served = {(await generate(fleet, f"session-{i}"))[1] for i in range(30)}
        assert served == {engines[1].pid, engines[2].pid}
        assert kinds(events, "engine-1") == ["started"]
        assert [state.restarts for state in fleet.snapshot()] == [0, 1, 0]


async def test_calls_go_on_while_an_engine_is_restarted(make_fleet, until):
    fleet, events, engines = make_fleet(serving={"servers": 2})
    async with fleet:
        keys = [f"session-{i}" for i in range(10)]
        await asyncio.gather(*(generate(fleet, key) for key in keys))  # each is pinned to an engine
        os.kill(engines[0].pid, signal.SIGKILL)
        await until(lambda: "died" in kinds(events, "engine-0"))
        await until(lambda: engines[0].url not in fleet.engine_urls)
        replies = [await generate(fleet, key) for key in keys]
        assert {status for status, _ in replies} == {200}


async def test_a_hung_engine_is_replaced(make_fleet, until):
    fleet, events, engines = make_fleet(probing=QUICK)
    async with fleet:
        os.kill(engines[0].pid, signal.SIGSTOP)
        await until(lambda: kinds(events, "engine-0") == ["started", "died", "restarted"])
        assert "did not answer any more" in next(event.detail for event in events if event.kind == "died")
        assert not alive(engines[0].pid)
        assert await generate(fleet) == (200, engines[1].pid)


async def test_a_router_that_is_killed_comes_back_with_all_engines(make_fleet, until):
    fleet, events, engines = make_fleet(serving={"servers": 2})
    async with fleet:
        url = fleet.router_url
        os.kill(fleet._router.pid, signal.SIGKILL)
        await until(lambda: kinds(events, "router") == ["started", "died", "restarted"])
        assert fleet.router_url == url
        assert set(await fleet._router.workers()) == {engine.url for engine in engines}
        assert (await generate(fleet))[0] == 200
        assert kinds(events, "engine-0") == ["started"]


async def test_router_and_engine_killed_together(make_fleet, until):
    fleet, events, engines = make_fleet(serving={"servers": 2})
    async with fleet:
        os.kill(fleet._router.pid, signal.SIGKILL)
        os.kill(engines[0].pid, signal.SIGKILL)
        await until(lambda: all(state.serving for state in fleet.snapshot()) and len(engines) == 3)
        await until(lambda: "restarted" in kinds(events, "engine-0") and "restarted" in kinds(events, "router"))
        assert set(await fleet._router.workers()) == {engines[1].url, engines[2].url}


async def test_an_engine_that_is_gone_too_often_ends_the_run(make_fleet, until):
    fleet, events, engines = make_fleet(
        mode=lambda started: "healthy" if started == 0 else "broken", serving={"max_restarts": 2}
    )
    async with fleet:
        failed = asyncio.create_task(fleet.failed())
        os.kill(engines[0].pid, signal.SIGKILL)
        with pytest.raises(StartupError, match=r"gone after 2 restarts[\s\S]*made of cheese"):
            await asyncio.wait_for(failed, 30)
        assert kinds(events, "engine-0") == ["started", "died", "died", "died", "gave_up"]
        assert fleet.engine_urls == ()
        assert len(engines) == 3


async def test_no_restart_is_allowed(make_fleet):
    fleet, _, _ = make_fleet(serving={"max_restarts": 0})
    async with fleet:
        os.kill(fleet._router.pid, signal.SIGKILL)
        with pytest.raises(StartupError, match="router is gone after 0 restarts"):
            await asyncio.wait_for(fleet.failed(), 30)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("broken", r"engine-1 ended with code 1 before it was up[\s\S]*made of cheese"),
        ("sick", r"engine-1 was not healthy after 1 s"),
    ],
)
async def test_an_engine_that_does_not_come_up(make_fleet, mode, message):
    fleet, events, engines = make_fleet(
        mode=lambda started: mode if started == 1 else "healthy",
        serving={"servers": 2, "startup_timeout_s": 1 if mode == "sick" else 30},
    )
    with pytest.raises(StartupError, match=message):
        await fleet.start()
    assert events == []
    assert not any(alive(pid) for engine in engines if (pid := engine.pid))
    assert not fleet._router.running


async def test_a_folder_that_is_no_model(make_fleet, tmp_path):
    fleet, _, _ = make_fleet(model={"path": tmp_path / "nowhere"})
    with pytest.raises(StartupError, match=r"nowhere is no model folder.*set model\.path"):
        await fleet.start()
    assert not fleet._router.running


async def test_the_routers_port_is_taken(make_fleet):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        fleet, _, engines = make_fleet(router={"port": taken.getsockname()[1]})
        with pytest.raises(StartupError, match=r"set router\.port"):
            await fleet.start()
    assert not any(alive(pid) for engine in engines if (pid := engine.pid))


async def test_a_start_that_is_cancelled_leaves_nothing_behind(make_fleet, until):
    fleet, _, engines = make_fleet(mode=lambda started: "sick")
    starting = asyncio.create_task(fleet.start())
    await until(lambda: bool(engines) and engines[0].pid is not None)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not alive(engines[0].pid)
    assert not fleet._router.running


async def test_a_listener_that_raises_ends_the_run_and_not_in_silence(make_config, fake_command, tmp_path):
    config, command = make_config(), fake_command()
    engine = LocalEngine("engine-0", config.model, config.serving, tmp_path / "log", command=command)

    def listener(event):
        if event.kind == "died":
            raise RuntimeError("the display broke")

    async with Fleet(config, tmp_path, listener, make_engine=lambda i: engine) as fleet:
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="the display broke"):
            await asyncio.wait_for(fleet.failed(), 30)


async def test_external_engines_are_registered_and_left_running(make_config, start_engine, tmp_path, until):
    (url_a, a), (url_b, b) = await asyncio.gather(start_engine(), start_engine())
    config = make_config(serving={"kind": "external", "urls": [url_a + "/", url_b], "startup_timeout_s": 5})
    events = []
    async with Fleet(config, tmp_path, events.append, probing=QUICK) as fleet:
        assert set(await fleet._router.workers()) == {url_a, url_b}
        os.kill(a.pid, signal.SIGSTOP)
        await until(lambda: kinds(events, "engine-0") == ["started", "died"])
        await until(lambda: fleet.engine_urls == (url_b,))
        assert await generate(fleet) == (200, b.pid)
        os.kill(a.pid, signal.SIGCONT)
        await until(lambda: kinds(events, "engine-0") == ["started", "died", "restarted"])
        assert set(await fleet._router.workers()) == {url_a, url_b}
    assert await is_healthy(url_a)
    assert await is_healthy(url_b)


async def test_external_engines_come_and_go(make_config, start_engine, tmp_path):
    (first, _), (second, _) = await asyncio.gather(start_engine(), start_engine())
    events = []
    config = make_config(serving={"kind": "external", "urls": [first], "startup_timeout_s": 1})
    async with Fleet(config, tmp_path, events.append) as fleet:
        await fleet.follow([first, second])
        assert fleet.engine_urls == (first, second)
        await fleet.follow([second])
        assert fleet.engine_urls == (second,)
        assert set(await fleet._router.workers()) == {second}
        await fleet.follow([second])
        with pytest.raises(StartupError, match=r"did not answer 200"):
            await fleet.follow([second, "http://127.0.0.1:9"])
        assert fleet.engine_urls == (second,)
    seen = [(event.server, event.kind) for event in events]
    assert seen[-2:] == [("engine-1", "started"), ("engine-0", "left")]


async def test_an_external_engine_that_is_not_there(make_config, tmp_path):
    config = make_config(serving={"kind": "external", "urls": ["http://127.0.0.1:9"], "startup_timeout_s": 0.5})
    with pytest.raises(StartupError, match=r"mend serving\.urls"):
        await Fleet(config, tmp_path).start()


async def test_the_cpu_engine_must_be_installed(make_config, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="rollout engine install"):
        await Fleet(make_config(serving={"device": "cpu"}), tmp_path).start()
