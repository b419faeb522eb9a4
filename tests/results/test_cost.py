"""What a step costs: the arithmetic, and that a display and a report agree."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml

from agent_wrapper.contract import Outcome
from builders import Clock, run_config
from made_runs import MadeRun, make_run
from report_page import Page
from rollout_backend.core.formats import dollars
from rollout_backend.errors import ConfigError
from rollout_backend.results.cost import Cost, Prices, Usage
from rollout_backend.results.export import export_run
from rollout_backend.results.page.report import write_report
from rollout_backend.results.progress import StepTotals
from rollout_backend.results.records import StepRecords, records_of
from rollout_backend.results.run_data import read_config, read_run
from rollouts import make_ledger, make_rollout, make_segment

AGENTS = {"vcpu_hour": 3600, "gb_hour": 360, "session_vcpus": 0.5, "session_gb": 2}
FREE = {"s3_put_million": 0, "s3_get_million": 0, "sqs_million": 0}


def prices(**section: float) -> Prices:
    found = Prices.of(run_config(prices=section))
    assert found is not None
    return found


def test_the_documented_example_of_a_rollout():
    cost = prices(session_vcpus=1, session_gb=0.5).cost(Usage(300, 270, 1), Usage(), 400)
    assert cost.agents == pytest.approx(0.000746 + 0.000394, abs=1e-6)
    assert cost.requests == pytest.approx(0.0000066)
    assert (cost.gpus, cost.wasted) == (0, 0)
    assert dollars(cost.total) == "$0.0011"


def test_gpus_are_paid_by_the_steps_time_and_wasted_by_session_time():
    found = prices(gpu_hour=36, gpus=4)
    assert found.cost(Usage(30, 10, 1), Usage(10, 0, 0), 100) == Cost(0, 0, pytest.approx(4), pytest.approx(1))
    assert found.cost(Usage(), Usage(), 100) == Cost(0, 0, pytest.approx(4), 0)
    serving = {"servers": 2, "tensor_parallel": 4}
    found = Prices.of(run_config(prices={"gpu_hour": 450}, serving=serving))
    assert found is not None
    assert (found.session_s, found.own_s, found.result, found.step_s) == (0, 0, 0, 1)


IMAGE = "000000000000.dkr.ecr.us-east-1.amazonaws.com/agent:1"
ROLE = "arn:aws:iam::000000000000:role/agent"
ARN = "arn:aws:bedrock-agentcore:us-east-1:000000000000:runtime/first-0123456789"
PROVIDER = "arn:aws:bedrock-agentcore:us-east-1:000000000000:capacity-provider/mine-0123456789"


@pytest.mark.parametrize(
    ("runtime", "section", "rates"),
    [
        ({}, {}, (0.0895, 0.00945)),
        ({}, {"platform": "V2"}, (0.1276, 0.0169)),
        ({"platform_version": "V2"}, {}, (0.1276, 0.0169)),
        ({"platform_version": "V2"}, {"vcpu_hour": 1}, (1, 0.0169)),
        ({"capacity_provider": PROVIDER}, {}, (0, 0)),
        (
            {"image": None, "role": None, "arn": ARN},
            {},
            (0.1276, 0.0169),
        ),  # AgentCore says V3, which nobody knows yet
        ({"image": None, "role": None, "arn": ARN}, {"platform": "V1"}, (0.0895, 0.00945)),
    ],
)
def test_prices_follow_the_runtimes_platform(runtime, section, rates):
    runtime = {"kind": "agentcore", "image": IMAGE, "role": ROLE, **runtime}
    config = run_config(runtime=runtime, prices={"session_vcpus": 1, "session_gb": 1, **section})
    found = Prices.of(config.priced_for("V3") if "arn" in runtime else config)
    assert found is not None
    assert (found.own_s * 3600, found.session_s * 3600) == pytest.approx(rates)
    assert ("EC2 instances" in found.left_out) is ("capacity_provider" in runtime)


def test_a_step_costs_the_same_in_a_display_and_by_its_records():
    clock = Clock(90.0)
    ledger, results = make_ledger(0, clock), []
    for i in range(3):
        ledger.plan(f"task-a.{i}", "task-a")
    totals = StepTotals(StepRecords(ledger, lambda entry: "", results))
    ledger.entries["task-a.0"].start_attempt("lost", 1, 900)
    clock.now = 100.0
    ledger.entries["task-a.0"].abandon_attempt()
    for i in range(3):
        ledger.entries[f"task-a.{i}"].start_attempt(f"session-{i}", 1, 900)
        ledger.entries[f"task-a.{i}"].accept()
    clock.now = 110.0
    segment = make_segment()
    turn = replace(segment.turns[0], seconds=4.0)
    rollout = make_rollout(
        "task-a.0", segments=[segment.model_copy(update={"turns": (turn,)})], started_at=1, finished_at=10
    )
    results.append(rollout)
    ledger.entries["task-a.0"].deliver(Outcome.COMPLETED, trainable=True)
    totals.update()
    clock.now = 120.0
    ledger.entries["task-a.1"].settle(Outcome.INFRA_ERROR, "container_lost", "")
    ledger.entries["task-a.2"].settle(Outcome.CANCELLED, "step_over", "")
    totals.update()
    assert (totals.trainable, totals.wasted) == (Usage(10, 4, 1), Usage(50, 0, 0))
    records = records_of(ledger, lambda entry: "", results)
    usable = [record.model_copy(update={"group_usable": True}) for record in records]
    found = prices(**AGENTS, **FREE)
    assert found.cost(totals.trainable, totals.wasted, 30) == found.cost_of(usable)
    # 0.2 dollars a second for memory, and 0.5 outside model calls
    assert found.cost_of(usable) == Cost(pytest.approx(12 + 28), 0, 0, pytest.approx(10 + 25))
    rejected = [record.model_copy(update={"group_usable": False}) for record in records]
    assert found.cost_of(rejected).wasted == found.cost_of(rejected).total


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"prices": {"session_gb": 1}}, "set both session_vcpus and session_gb"),
        ({"prices": {"gpu_hour": 1}, "serving": {"kind": "external", "urls": ["http://e"]}}, "needs prices.gpus"),
        ({"prices": {"gpu_hour": -1}}, "prices.gpu_hour"),
    ],
)
def test_prices_that_make_no_sense_are_refused(sections, message):
    with pytest.raises(ConfigError, match=message):
        run_config(**sections)


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
