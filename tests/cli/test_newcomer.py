"""The mistakes of a newcomer, and what the command line says about each."""

from __future__ import annotations

import logging

from rollout_backend import manager
from rollout_backend.local.scripted import ScriptedEngine
from rollout_backend.observe import first_call, live_view
from rollout_backend.serving.server_process import free_port


def test_a_wrong_public_url(rollout, settings, tasks, agent_server, run_id, monkeypatch, caplog):
    monkeypatch.setattr(first_call, "WARN_AFTER_S", 0.5)
    monkeypatch.setattr(manager, "_FIRST_CALL_POLL_S", 0.1)
    monkeypatch.setattr(live_view, "_LINES_S", 0.2)
    url = f"http://127.0.0.1:{free_port()}"
    with ScriptedEngine(["7"]) as engine, caplog.at_level(logging.WARNING, "rollout_backend.manager"):
        config = settings(
            run_id=run_id,
            runtime={"kind": "http", "url": agent_server},
            serving={"kind": "external", "urls": [engine.url]},
            queue={"wait_s": 1},
            gateway={"public_url": url},
            timeouts={"model_call_s": 1, "agent_s": 3, "publish_grace_s": 30, "collection_s": 60},
        )
        code, output = rollout("run", config, "--tasks", tasks)
    assert code == 3, output
    said = f"and agents run: can they reach {url} (gateway.public_url)?"
    assert [said in record.message for record in caplog.records] == [True]
    assert f"1 running, 0 tok/s, at most 59 s left; no model call has arrived for 1 s, {said}" in output
    assert "infra_error, model_unreachable: this container could not reach the model endpoint at" in output
    assert f"{url}/v1 within 3 s ([Errno 111] Connection refused). Set gateway.public_url" in output
    assert "1 of 1 rollouts lost to the infrastructure, most often model_unreachable (1)" in output
