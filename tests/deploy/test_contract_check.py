"""Agents that break the container's contract, each in one way."""

from __future__ import annotations

import pytest

from rollout_backend.deploy.contract_check import check_contract

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
        (HEAD + GOOD + TAIL, ["ok", "ok", "ok"], "sealed, with 1 model calls"),
        (HEAD + "    return 1.0\n" + TAIL, ["ok", "problem", "ok"], "has no model call"),
        (HEAD + "    ask(context)\n    raise ValueError('odd')\n" + TAIL, ["ok", "warning", "ok"], "odd"),
        ("raise SystemExit('broken')", ["problem"], "broken"),
        (
            HEAD + GOOD + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.signal = lambda *_: None\n" + TAIL,
            ["ok", "ok", "problem"],
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
