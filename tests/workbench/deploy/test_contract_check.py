"""Agents that break the container's contract, each in one way."""

import json
import math
import time

import pytest
from aiohttp import web

from builders import served
from rollout_backend.workbench.deploy.contract_check import check_contract, check_pings

NOW = int(time.time())

HEAD = """
import os, signal, sys, time
import httpx
from agent_wrapper import RolloutApp

app = RolloutApp()

def ask(context):
    body = {"model": context.model, "messages": [{"role": "user", "content": "hello"}]}
    key = {"Authorization": f"Bearer {context.api_key}"}
    httpx.post(f"{context.base_url}/chat/completions", json=body, headers=key, timeout=300).raise_for_status()

@app.entrypoint
def agent(context):
"""
TAIL = """
if __name__ == "__main__":
    app.run()
"""
GOOD = "    ask(context)\n    return 1.0\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "levels", "text"),
    [
        (HEAD + GOOD + TAIL, ["ok"] * 4, "sealed, with 1 model call"),
        (HEAD + "    return 1.0\n" + TAIL, ["ok", "problem", "ok", "ok"], "has no model call"),
        (HEAD + "    ask(context)\n    raise ValueError('odd')\n" + TAIL, ["ok", "warning", "ok", "ok"], "odd"),
        ("raise SystemExit('broken')", ["problem"], "broken"),
        (
            HEAD + GOOD + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.signal = lambda *_: None\n" + TAIL,
            ["ok", "ok", "ok", "problem"],
            "ignores SIGTERM",
        ),
    ],
    ids=["good", "no model call", "raises", "does not start", "ignores SIGTERM"],
)
async def test_a_broken_agent_is_found(tmp_path, code, levels, text):
    (tmp_path / "agent.py").write_text(code)
    findings = await check_contract(tmp_path, {})
    assert [finding.level for finding in findings] == levels
    assert text in "\n".join(str(finding) for finding in findings)


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([{"status": "Healthy", "time_of_last_update": NOW}] * 2, "names the time"),
        ([{"status": "HealthyBusy", "time_of_last_update": NOW - 0.5}] * 2, "names the time"),
        (
            [
                {"status": "HealthyBusy", "time_of_last_update": NOW},
                *[{"status": "Healthy", "time_of_last_update": NOW + 1}] * 2,
            ],
            "names the time",
        ),
        ([{"status": "Healthy", "time_of_last_update": NOW + i} for i in range(2)], "the status has not changed"),
        ([{"status": "Healthy", "time_of_last_update": "2026-01-01T00:00:00Z"}], "must be a number of seconds"),
        ([{"status": "Healthy", "time_of_last_update": math.nan}], "must be the time in Unix seconds"),
        ([{"status": "Healthy", "time_of_last_update": NOW * 1000}], "must be the time in Unix seconds"),
        ([{"status": "ok", "time_of_last_update": NOW}], "status must be Healthy or HealthyBusy"),
        (["pong"], "status must be Healthy or HealthyBusy"),
        ([None], "gave no JSON"),
    ],
)
async def test_pings_are_held_to_the_contract(answers, text):
    left = [*answers]

    async def ping(_: web.Request) -> web.Response:
        answer = left.pop(0)
        return web.Response(text="pong" if answer is None else json.dumps(answer))

    async with served(ping) as url:
        finding = await check_pings(url, NOW)
    assert (finding.setting, text in finding.text) == ("ping", True)
    assert (finding.level == "ok") == (text == "names the time")
    assert not left
