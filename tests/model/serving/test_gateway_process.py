import asyncio
import json
import resource
import signal
from urllib.parse import urlsplit

import openai
import pytest

from agent_wrapper.shared.trajectory import fetch_trajectory
from builders import complete, run_config
from rollout_backend.core.seal import SealClaims, Sealer
from rollout_backend.core.session_key import read_claims
from rollout_backend.errors import ConfigError, ServingError, StartupError
from rollout_backend.model.gateway.access import allow_files
from rollout_backend.model.serving import gateway_process
from rollout_backend.model.serving.gateway_fleet import GatewayFleet
from rollout_backend.model.serving.server_process import ServerProcess
from rollout_backend.workbench.local.scripted import ScriptedEngine


async def test_a_gateway_process_serves_seals_revokes_and_logs_nothing_private(tmp_path, claims, monkeypatch):
    """Nor do strangers fill its log."""
    monkeypatch.setenv("ROLLOUT_LOG_FORMAT", "json")  # as `rollout --log-json` does
    monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # as the command line does
    folder, secret = tmp_path / "logs", "the secret of the settings " * 2
    with ScriptedEngine(["a very private answer"]) as engine:
        fleet = GatewayFleet(
            run_config(gateway={"secret": secret}), engine.url, folder, secret, secret, journals=folder / "j"
        )
        await fleet.stop()  # does nothing before the start
        await fleet.start()
        try:
            endpoint = fleet.endpoint(claims())
            assert endpoint.trajectory_url == f"{fleet.urls[0]}/v1/rollout/trajectory"
            assert await complete(endpoint, "a very private question") == "a very private answer"
            stats = await fleet.stats()
            assert (stats.calls, stats.sessions_open) == (1, 1)
            other = fleet.endpoint(claims("other"))
            await complete(other, "a very private question")
            trajectory = await fetch_trajectory(other, budget_s=120)
            sealed = read_claims(trajectory.seal or "", SealClaims)
            assert trajectory.seal == Sealer(secret).seal(trajectory, claims("other"), sealed.first_call_s).seal
            await fleet.revoke(["s"])
            with pytest.raises(openai.APIStatusError, match="closed"):
                await complete(endpoint)
            server = urlsplit(fleet.urls[0])
            for _ in range(50):
                reader, writer = await asyncio.open_connection(server.hostname, server.port)
                writer.write(b"nonsense\r\n\r\n")
                assert b" 400 " in await reader.read()
                writer.close()
        finally:
            await fleet.stop()
        [gateway] = fleet._shards
    assert f"the gateway ended with code {-signal.SIGTERM}." in await gateway.wait()
    with pytest.raises(ServingError, match="not running"):
        await fleet.stats()
    logged = (folder / "gateway.log").read_text()
    assert endpoint.api_key not in logged
    assert secret not in logged
    assert "private" not in logged
    assert "Traceback" not in logged
    warnings = [line["message"] for line in map(json.loads, logged.splitlines()) if line["level"] != "INFO"]
    assert 1 <= len(warnings) <= 2
    assert all("Invalid HTTP request" in each for each in warnings)


async def test_a_gateway_process_knows_the_kind_of_router(tmp_path, monkeypatch):
    """With smg it sends calls for routed experts to the router."""
    given = []

    def record(*_, stdin, **__):
        given.append(json.loads(stdin)["router"])
        raise StartupError("not started")

    monkeypatch.setattr(gateway_process, "ServerProcess", record)
    with pytest.raises(StartupError, match="not started"):
        await GatewayFleet(run_config(router={"kind": "smg"}), "http://e", tmp_path, journals=tmp_path).start()
    assert given == ["smg"]


@pytest.mark.slow
async def test_an_unusable_model_is_reported(tmp_path):
    settings = run_config(model={"path": str(tmp_path)})
    with pytest.raises(StartupError, match="holds no tokenizer"):
        await GatewayFleet(settings, "http://e", tmp_path, journals=tmp_path / "j").start()


def test_the_limit_of_open_files_is_raised_or_reported(monkeypatch):
    limits = [(128, 2048)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    allow_files(64)
    allow_files(16)
    assert limits == [(128, 2048), (2048, 2048)]  # connections of agents whose calls wait need files, too
    with pytest.raises(ConfigError, match=r"gateway\.max_concurrent_calls=1000 takes 3768 open files.*ulimit -Hn"):
        allow_files(1000)


async def test_a_server_may_open_more_files_than_the_shell_that_started_it(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        process = ServerProcess("sh", ["sh", "-c", "ulimit -n"], tmp_path / "log")
        await process.start()
        await process.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert int((tmp_path / "log").read_text()) == min(hard, 65_536)
