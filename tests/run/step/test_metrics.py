"""The metrics of a run's steps: as Prometheus reads them, as documented, and in the dashboard."""

import json
import re
from collections import Counter
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent_wrapper.contract import Failure
from rollout_backend.core.tasks import Task
from rollout_backend.errors import StartupError, Throttled
from rollout_backend.model.gateway.stats import GatewayStats
from rollout_backend.model.serving.engine_fleet import ServerState
from rollout_backend.model.serving.supervisor import ServingEvent
from rollout_backend.run.accounts.metrics import RunMetrics, serve_metrics
from step_bench import Agents, only

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
DOCUMENTED = {
    name: (kind, {*re.findall(r"`(\w+)`", labels)})
    for name, kind, labels in re.findall(r"^\| `(rollout_\w+)` \| (\w+) \| (.*?) \|", PAGE, flags=re.M)
}
SERVERS = (
    ServerState("router", "http://r", serving=True, restarts=0),
    ServerState("engine-0", "http://0", serving=True, restarts=0),
    ServerState("engine-1", "http://1", serving=False, restarts=1),
)


async def test_a_steps_rollouts_calls_and_times_are_counted_once_and_served_as_documented(open_bench):
    bench = await open_bench("group.size=1", "observe.metrics_port=0")
    refused = set()

    async def refuse_once(request):
        if request.rollout_id not in refused:
            refused.add(request.rollout_id)
            raise Throttled("slow down")

    own = Failure(reason="a_reason_of_the_agent", message="no")
    step = bench.step("done", "own", behave=only("own", lambda *args: Agents.fail(*args, failure=own)))
    bench.agents.before = refuse_once
    metrics = RunMetrics(bench.config)
    metrics.record_event(ServingEvent(0.0, "engine-1", "died"))
    value = metrics.registry.get_sample_value
    accounts = steps, *_ = [step], bench.services.dispatcher, bench.services.buffer, SERVERS
    metrics.update(*accounts, None)
    assert value("rollout_gateway_up") == 0
    bench.check_ended(await step.run())

    async def refresh():
        given_up = Counter(calls=2, prompt_tokens=30, sampled_tokens=40, limit_tokens=50)
        stats = GatewayStats(sessions_open=1, calls_in_flight=2, calls=5, errors={"x": 1}, engine_given_up=given_up)
        metrics.update(*accounts, stats)
        # A gateway that restarts has not asked the engines yet.
        metrics.update(*accounts, stats.model_copy(update={"engine_given_up": Counter()}))

    await refresh()
    await refresh()
    metrics.end_step(step, step.results.records.all())
    steps.clear()
    async with serve_metrics(bench.config.observe, metrics, refresh) as url, httpx.AsyncClient(timeout=120) as client:
        families = {each.name: each for each in text_string_to_metric_families((await client.get(url)).text)}
        config = bench.config.observe.model_copy(update={"metrics_port": httpx.URL(url).port})
        with pytest.raises(StartupError, match=r"observe\.metrics_port"):
            async with serve_metrics(config, metrics, refresh):
                pass
    assert value("rollout_rollouts_total", {"outcome": "completed", "reason": ""}) == 1
    assert value("rollout_rollouts_total", {"outcome": "agent_error", "reason": "other"}) == 1
    assert value("rollout_runtime_calls_total", {"call": "invoke", "answer": "granted"}) == 2
    assert value("rollout_runtime_calls_total", {"call": "invoke", "answer": "throttled"}) == 2
    assert value("rollout_runtime_calls_total", {"call": "stop", "answer": "granted"}) == 2
    assert value("rollout_delivery_seconds_count") == value("rollout_duration_seconds_count") == 2
    assert value("rollout_step_duration_seconds_count") == 1
    assert value("rollout_phase_seconds_total", {"phase": "own"}) > 0
    assert value("rollout_queue_up") == value("rollout_servers_up", {"server": "engine"}) == 1
    assert value("rollout_gateway_calls_total") == 5  # three scrapes
    assert value("rollout_gateway_errors_total", {"code": "x"}) == 1
    assert value("rollout_gateway_given_up_calls_total") == 2
    tokens = [
        value("rollout_gateway_given_up_tokens_total", {"kind": kind}) for kind in ("prompt", "sampled", "limit")
    ]
    assert tokens == [30, 40, 50]
    assert value("rollout_open_sessions") == value("rollout_open_rollouts", {"phase": "running"}) == 0
    served = {name for name in families if not name.endswith("_created")}
    assert served == {name.removesuffix("_total") for name in DOCUMENTED}
    for name, (kind, labels) in DOCUMENTED.items():
        family = families[name.removesuffix("_total")]
        found = [sample for sample in family.samples if sample.name in samples_of(name)]
        assert family.type == kind
        assert {*found[0].labels} - {"le"} == labels, name
        assert {sample.name for sample in found} == samples_of(name)


async def test_metrics_that_fail_do_not_end_a_step(open_bench, tmp_path, monkeypatch, caplog):
    def fail(*args: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(RunMetrics, "end_step", fail)
    bench = await open_bench("observe.metrics_port=0", "group.size=1", f"output_dir={tmp_path}")
    result = await bench.manager().collect([Task("task-a", {})])
    assert len(result.rollouts) == 1
    assert "metrics or traces of step 0 are incomplete" in caplog.text


def samples_of(name: str) -> set[str]:
    """Return the names of a documented metric's samples."""
    kind, _ = DOCUMENTED[name]
    return {f"{name}_{suffix}" for suffix in ("bucket", "sum", "count")} if kind == "histogram" else {name}


LABELS = {
    sample: {*labels, "instance", "le"} for name, (_, labels) in DOCUMENTED.items() for sample in samples_of(name)
}


def check_expression(text: str) -> None:
    """Check the metrics of a PromQL expression, and the labels that it selects and groups by."""
    used = re.findall(r"(rollout_\w+)(?:\{(.*?)\})?", text)
    assert used, text
    assert {name for name, _ in used} <= LABELS.keys(), text
    for name, selectors in used:
        assert set(re.findall(r"(\w+)[=!]", selectors)) <= LABELS[name], text
    common = set.intersection(*(LABELS[name] for name, _ in used))
    for grouped in re.findall(r"\b(?:by|ignoring) \((.*?)\)", text):
        assert set(grouped.split(", ")) <= common, text


def test_the_alerts_name_metrics_that_exist():
    found = re.findall(r"\| `(.*)` \|$", PAGE.partition("## Alerts")[2], flags=re.M)
    assert len(found) >= 4
    for expression in found:
        check_expression(expression)


def test_the_dashboard_shows_each_metric_and_no_other():
    dashboard = json.loads((ROOT / "infra" / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    for expression in expressions:
        check_expression(expression)
        assert 'instance=~"$instance"' in expression
    shown = set(re.findall(r"rollout_\w+", " ".join(expressions)))
    assert [name for name in DOCUMENTED if shown.isdisjoint(samples_of(name))] == []
