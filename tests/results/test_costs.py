"""Estimated dollars in reports and tables."""

from pathlib import Path

import pyarrow.parquet
import pytest
import yaml

from made_runs import MadeRun, make_run
from report_page import Page
from rollout_backend.core.formats import dollars
from rollout_backend.results.cost import Prices
from rollout_backend.results.export import export_run
from rollout_backend.results.page.report import write_report
from rollout_backend.results.run_data import read_config, read_run


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_with_prices_shows_what_it_cost_and_what_was_wasted(tmp_path: Path, steps: int):
    run = make_run(tmp_path / "run", MadeRun(tasks=3, group=3, lost=0.5, steps=steps))
    before = Page(write_report(run)).text("overview")
    assert "estimated" not in before
    settings = run / "config.yaml"
    prices = {"session_vcpus": 0.3, "session_gb": 0.5, "gpu_hour": 2.5}
    settings.write_text(yaml.safe_dump(yaml.safe_load(settings.read_text()) | {"prices": prices}))
    config = read_config(run)
    assert config is not None
    known = Prices.of(config)
    assert known is not None
    costs = [known.cost_of(step.records) for step in read_run(run).steps]
    total, wasted = sum(cost.total for cost in costs), sum(cost.wasted for cost in costs)
    assert 0 < wasted < total
    page = Page(write_report(run))
    shown = f"estimated cost {dollars(total)} {dollars(wasted)} in untrained rollouts"
    assert shown in page.text("overview")
    if steps > 1:
        assert "estimated cost" in Page(run / "report" / "00000001.html").text("overview")
        assert f"{dollars(costs[1].total)} {dollars(costs[1].wasted)}" in page.text("steps")
    export_run(run, "parquet", tmp_path)
    rows = pyarrow.parquet.read_table(tmp_path / "steps.parquet").to_pylist()
    assert [row["cost_dollars"] for row in rows] == [cost.total for cost in costs]
    assert [row["wasted_dollars"] for row in rows] == [cost.wasted for cost in costs]
