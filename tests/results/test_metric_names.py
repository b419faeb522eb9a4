"""The metrics in the documentation and in the dashboard are those of the code."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rollout_backend.results.metrics import METRICS

ROOT = Path(__file__).parents[2]
LABELS = {sample: {*metric.labels, "instance", "le"} for metric in METRICS for sample in metric.samples}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads((ROOT / "infra" / "grafana-dashboard.json").read_text())


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


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


def test_the_page_describes_each_metric() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(rollout_\w+)` \| (\w+) \| (.*?) \|", page, flags=re.M)
    assert [(name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows] == [
        (metric.name, metric.kind, metric.labels) for metric in METRICS
    ]


def test_the_alerts_name_metrics_that_exist() -> None:
    _, _, alerts = (ROOT / "docs" / "metrics.md").read_text().partition("## Alerts")
    found = re.findall(r"\| `(.*)` \|$", alerts, flags=re.M)
    assert len(found) >= 4
    for expression in found:
        check_expression(expression)


def test_the_dashboard_shows_each_metric_and_no_other(dashboard) -> None:
    for expression in expressions(dashboard):
        check_expression(expression)
        assert 'instance=~"$instance"' in expression
    shown = set(re.findall(r"rollout_\w+", " ".join(expressions(dashboard))))
    assert [metric.name for metric in METRICS if shown.isdisjoint(metric.samples)] == []
