"""What a step costs: the arithmetic, and that a display and a report agree."""

from pathlib import Path

import pyarrow.parquet
import pytest
import yaml

from agent_wrapper.contract import Outcome
from builders import run_config
from made_runs import MadeRun, make_run
from report_page import Page
from rollout_backend.base.formats import dollars
from rollout_backend.run.accounts.cost import Cost, Prices
from rollout_backend.run.accounts.summary import Usage, summarize
from rollout_backend.views.export import export_run
from rollout_backend.views.page.report import write_report
from rollout_backend.views.run_data import read_config, read_run
from run_folders import make_record, make_summary

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


def test_a_step_is_paid_by_the_time_of_its_sessions_and_what_is_not_trained_is_wasted():
    times = {"planned_at": 90.0, "invoked_at": 100.0, "accepted_at": 100.0}
    result = make_summary(1.0, model_s=4.0, agent_s=9.0)
    records = [
        make_record("a.0", **times, first_invoked_at=90.0, settled_at=110.0, result=result, trainable=True),
        make_record("a.1", **times, settled_at=120.0, outcome=Outcome.INFRA_ERROR),
        make_record("a.2", **times, settled_at=120.0, outcome=Outcome.CANCELLED),
    ]
    found = prices(**AGENTS, **FREE)
    # 0.2 dollars a second for memory, and 0.5 outside model calls
    assert found.cost_of(summarize(records)) == Cost(pytest.approx(12 + 28), 0, 0, pytest.approx(10 + 25))
    rejected = [record.model_copy(update={"group_usable": False}) for record in records]
    cost = found.cost_of(summarize(rejected))
    assert cost.wasted == cost.total


def test_gpus_of_steps_at_the_same_time_are_paid_once():
    """Steps of an asynchronous trainer overlap."""
    found = prices(gpu_hour=3600, gpus=1)
    first, inside, across, later = (
        summarize([make_record("a.0", planned_at=began, settled_at=ended)])
        for began, ended in ((100.0, 120.0), (105.0, 110.0), (115.0, 130.0), (200.0, 210.0))
    )
    assert found.cost_of_steps([later, across, inside, first]).gpus == pytest.approx(40)
    apart = found.cost_of_steps([first, later])
    assert apart.total == pytest.approx(found.cost_of(first).total + found.cost_of(later).total)


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
    costs = [known.cost_of(step.summary) for step in read_run(run).steps]
    total, wasted = sum(cost.total for cost in costs), sum(cost.wasted for cost in costs)
    assert 0 < wasted < total
    page = Page(write_report(run))
    shown = f"estimated cost {dollars(total)} {dollars(wasted)} in rollouts that cannot be trained"
    assert shown in page.text("overview")
    if steps > 1:
        assert "estimated cost" in Page(run / "report" / "00000001.html").text("overview")
        assert f"{dollars(costs[1].total)} {dollars(costs[1].wasted)}" in page.text("steps")
    export_run(run, "parquet", tmp_path)
    rows = pyarrow.parquet.read_table(tmp_path / "steps.parquet").to_pylist()
    assert [row["cost_dollars"] for row in rows] == [cost.total for cost in costs]
    assert [row["wasted_dollars"] for row in rows] == [cost.wasted for cost in costs]
