"""What the pages of a step and of a training show, compared with the records of their rollouts."""

import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from agent_wrapper.contract import Failure, Outcome, Rollout, readable
from made_runs import MadeRun, make_run, reopen_last_step
from report_page import Page
from rollout_backend.base import formats
from rollout_backend.config import AgentCoreConfig
from rollout_backend.errors import ConfigError
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.accounts.records import ResultSummary, RolloutRecord
from rollout_backend.run.accounts.summary import Learning, rewards_by_task, seconds_of, summarize
from rollout_backend.views.page import report
from rollout_backend.views.page.charts import histogram, throughput
from rollout_backend.views.page.report import try_to_write_report, write_report
from rollout_backend.views.page.step_page import step_context
from rollout_backend.views.run_data import changed_settings, read_run
from rollout_backend.views.words import WORDS
from rollout_backend.workbench.local.cloud import ARN
from rollouts import make_rollout, make_segment
from run_folders import make_record, make_step, make_summary, write_training

HOSTILE = "</script><img src=x onerror=alert(1)><!-- \u2028 '\" {{ 7 * 7 }}"


def test_each_figure_of_the_results_has_a_row_with_its_meaning(made: Path):
    run = read_run(made)
    figures = step_context(run, run.steps[0])["figures"]
    results = [record.result for record in RunArchive(made).read_records(0) if record.result is not None]
    for name, meaning, (median, _, most) in figures:
        values = sorted(value for each in results if (value := getattr(each, name)) is not None)
        assert (median, most) == (pytest.approx(np.median(values)), values[-1])
        assert meaning == ResultSummary.model_fields[name].description
    known = {name for name in ResultSummary.model_fields if any(getattr(each, name) is not None for each in results)}
    assert {name for name, _, _ in figures} == known
    assert known >= {"reward", "turns", "model_s"}


def test_headline_numbers_are_those_of_the_records(made: Path, page: Page):
    records = RunArchive(made).read_records(0)
    rewards = [record.reward for record in records if record.reward is not None]
    completed = sum(record.outcome is Outcome.COMPLETED for record in records)
    spread = sum(
        len({each.reward for each in records if each.task_id == task} - {None}) > 1 for task in tasks(records)
    )
    text = page.text("overview")
    for part in (
        f"mean reward {sum(rewards) / len(rewards):.3g} ",
        f"tasks that teach {spread} / 12 ",
        f"completed {completed} / 72 {sum(record.trained for record in records)} can be trained",
        f"{sum(record.result.prompt_tokens for record in records if record.result):,} prompt tokens",
    ):
        assert part in text


def tasks(records: list[RolloutRecord]) -> set[str]:
    return {record.task_id for record in records}


def test_a_missing_reward_is_hatched_and_never_0(made: Path, page: Page):
    records = RunArchive(made).read_records(0)
    missing = [record for record in records if record.reward is None]
    assert len(missing) > 5
    drawn = Counter[str]()
    for tag, attributes in page.tags:
        css = attributes.get("class") or ""
        if tag == "path" and (css.startswith("miss ") or re.fullmatch(r"q\d+", css)):
            drawn[css] += (attributes["d"] or "").count("M")
    for outcome, number in Counter(record.outcome for record in missing).items():
        assert drawn[f"miss {outcome}"] == number
    assert sum(number for css, number in drawn.items() if css.startswith("q")) == len(records) - len(missing)
    rewards = dict(zip(page.data["id"], page.data["reward"], strict=True))
    assert {name for name, reward in rewards.items() if reward is None} == {each.rollout_id for each in missing}


def test_each_failure_has_its_reason_an_example_and_what_to_do(made: Path, page: Page):
    failed = [record for record in RunArchive(made).read_records(0) if record.failed]
    text = page.text("failures")
    for reason, number in Counter(record.reason for record in failed).items():
        first = next(record for record in failed if record.reason == reason)
        assert f"{reason} {number} {first.rollout_id} : {first.message}" in text
    assert "read the stack in rollout show ; raise the limit" in text
    assert "see docs/troubleshooting.md#agent_deadline" in text
    assert 'item = json.loads(call.function.arguments)["item"]' in text


def test_tokens_have_their_text_and_probability(made: Path, page: Page):
    path = next(iter(sorted(made.glob("rollouts/*/*"))))
    rollout = Rollout.decode(path.read_bytes())
    turns = [item["turn"] for item in page.data["talks"][rollout.rollout_id]["parts"][0]["items"] if "turn" in item]
    replies = [each["content"] for each in rollout.segments[0].messages if each["role"] == "assistant"]
    assert "".join(turns[-1]["tokens"]) == replies[-1]
    assert len(turns[-1]["percent"]) == turns[-1]["count"]
    assert all(0 <= percent <= 100 for percent in turns[-1]["percent"])


def test_the_file_needs_no_network_and_names_its_pictures(page: Page):
    assert not re.findall(r"(?:src|href)=[\"'](?!#)", page.html)
    assert "@import" not in page.html
    assert "url(http" not in page.html
    for tag, attributes in page.tags:
        if tag == "svg":
            assert attributes["aria-label"]
    assert len([attributes["id"] for _, attributes in page.tags if attributes.get("id")]) == len(
        {attributes["id"] for _, attributes in page.tags if attributes.get("id")}
    )
    anchors = {attributes["id"] for _, attributes in page.tags if attributes.get("id")}
    links = [attributes.get("href") or "" for tag, attributes in page.tags if tag == "a"]
    assert len(links) > 10
    for link in links:
        assert link[1:] in anchors or link[3:] in page.data["id"], link


def test_words_of_this_project_are_explained_and_linked(page: Page):
    links = {attributes["title"] for tag, attributes in page.tags if attributes.get("href") == "#words"}
    assert links == {WORDS[word] for word in ("reconciles", "spread", "weights")}
    explained = " ".join(page.texts["words"])
    assert all(meaning in explained for meaning in WORDS.values())


def test_texts_of_agents_stay_texts(tmp_path: Path):
    archive = RunArchive(tmp_path / "run")
    message = {"role": HOSTILE, "content": HOSTILE}
    done = make_rollout(
        "a.0",
        segments=[
            make_segment().model_copy(update={"messages": (message, {"role": "assistant", "content": HOSTILE})})
        ],
        extras={HOSTILE: HOSTILE},
    )
    failed = make_rollout(
        "a.1",
        Outcome.AGENT_ERROR,
        failure=Failure(reason="agent_exception", message=HOSTILE, traceback=HOSTILE),
        segments=[],
    )
    for rollout in (done, failed):
        archive.write_rollout(rollout, rollout.encode())
    records = [
        make_record("a.0", message=HOSTILE, result=ResultSummary.of(done)),
        make_record("a.1", outcome=Outcome.AGENT_ERROR, reason=HOSTILE, message=HOSTILE, log=HOSTILE,
                    session_ids=(HOSTILE,), result=ResultSummary.of(failed)),
        make_record(HOSTILE, task_id=HOSTILE, outcome=Outcome.INFRA_ERROR, reason="lost", message=HOSTILE),
    ]  # fmt: skip
    archive.write_records(0, records)
    archive.close()
    page = Page(write_report(tmp_path / "run"))
    assert "img" not in {tag for tag, _ in page.tags}
    assert "<img" not in page.html
    assert [tag for tag, _ in page.tags].count("script") == 4
    assert page.data["messages"] == [HOSTILE]
    assert page.data["talks"]["a.0"]["parts"][0]["items"][0]["text"] == readable(HOSTILE)
    assert page.data["talks"]["a.1"]["traceback"] == readable(HOSTILE)
    assert "49" not in page.text("failures")
    assert HOSTILE.split("\u2028")[0] in page.text("failures")


def test_ten_thousand_rollouts_make_a_file_of_bounded_size(tmp_path: Path):
    run = make_run(tmp_path / "run", MadeRun(tasks=25, group=8, stored=20))
    archive = RunArchive(run)
    few = archive.read_records(0)
    copies = ["", *(f"-{i}" for i in range(1, 50))]
    archive.write_records(
        0,
        [
            record.model_copy(
                update={"rollout_id": f"{record.rollout_id}{copy}", "task_id": f"{record.task_id}{copy}"}
            )
            for copy in copies
            for record in few
        ],
    )
    path = write_report(run)
    assert path.stat().st_size < 3_000_000
    page = Page(path)
    assert len(page.data["id"]) == 10_000
    assert "10,000 planned rollouts" in page.html
    assert f"The file holds the conversations of {len(page.data['talks'])} of 10,000 rollouts" in page.html
    assert 0 < len(page.data["talks"]) <= 20


def test_conversations_are_bounded_and_failures_come_first(tmp_path: Path):
    run = make_run(tmp_path / "run", MadeRun(tasks=60, group=6, lost=0.2))
    records = RunArchive(run).read_records(0)
    failed = [record.rollout_id for record in records if record.failed and record.result is not None]
    held = list(Page(write_report(run)).data["talks"])
    assert len(held) == 300 < len(records)
    assert failed
    assert held[: len(failed)] == failed


def test_an_interrupted_step_has_a_page(tmp_path: Path):
    archive = RunArchive(tmp_path / "run")
    open_ = {"outcome": None, "result_at": None, "settled_at": None}
    archive.write_records(
        0, [make_record("a.0", **open_), make_record("a.1", accepted_at=None, invoked_at=None, **open_)]
    )
    page = Page(write_report(tmp_path / "run"))
    assert "the step was interrupted when 0 of 2 rollouts had ended" in page.html
    assert "not settled 2" in page.text("ledger")
    assert read_run(tmp_path / "run").steps[0].summary.left_out == {"not settled": 2}


@pytest.mark.parametrize(
    ("lost", "css", "says"),
    [
        (0.0, "good", "✓ 12 of 12 rollouts completed"),
        (1.0, "bad", "✗ nothing to train on: 0 of 12 rollouts completed"),
    ],
)
def test_a_report_leads_with_the_verdict(tmp_path: Path, lost: float, css: str, says: str):
    page = Page(write_report(make_run(tmp_path / "run", MadeRun(tasks=3, group=4, lost=lost))))
    badges = [name for _, attributes in page.tags if (name := attributes.get("class") or "").startswith("badge ")]
    assert badges == [f"badge {css}", "badge small good"]
    assert f'<div class="badge {css}">{says}' in page.html


@pytest.mark.parametrize("steps", [1, 3])
def test_nothing_is_red_because_it_has_not_ended(tmp_path: Path, steps: int):
    folder = make_run(tmp_path / "run", MadeRun(tasks=3, group=4, lost=0.0, steps=steps))
    reopen_last_step(folder, still_open=12)
    path = write_report(folder)
    page = Page(path)
    css = {css for _, attributes in page.tags for css in (attributes.get("class") or "").split()}
    assert css & {"badge", "bad", "dn", "l0", "f-k0"} == {"badge"}
    if steps > 1:
        assert "trained 24 / 24 0 left out of ended steps" in page.text("overview")
        path = folder / "report" / f"{steps - 1:08d}.html"
    page = Page(path)
    assert set(page.data["trained"]) == {None}
    shown, _, others = page.html.partition("<details>")
    assert (shown.count('data-until="'), others.count('data-until="')) == (10, 2)
    assert "<summary>2 more</summary>" in others


def test_large_numbers_are_written_out():
    assert [formats.number(each) for each in (999.7, 12_345.6, 999.9e6)] == ["1,000", "12,346", "0.9999 G"]
    distribution = histogram([10_000, 34_000])
    assert distribution is not None
    assert distribution["bars"][-1][2] == "33,000 to 34,000"


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert try_to_write_report(tmp_path) is None
    assert "could not be written" in caplog.text
    with pytest.raises(ConfigError, match="holds no records"):
        write_report(tmp_path)


def test_what_a_task_teaches():
    def learning(*groups: list[float | None]) -> list[Learning]:
        records = [
            make_record(f"{name}.{i}", task_id=str(name), result=None if reward is None else make_summary(reward))
            for name, group in enumerate(groups)
            for i, reward in enumerate(group)
        ]
        found = {task.task_id: task.learning for task in rewards_by_task(records)}
        return [found[str(name)] for name in range(len(groups))]

    assert learning([0, 1], [0, 0], [1, 1], [0.5, 0.5], [None, None], [None, 1]) == [
        Learning.MIXED, Learning.NEVER, Learning.ALWAYS, Learning.FLAT, Learning.UNKNOWN, Learning.ALWAYS,
    ]  # fmt: skip
    assert learning([0, 0]) == [Learning.NEVER]
    assert learning([1, 1]) == [Learning.ALWAYS]


def test_each_second_of_a_rollout_is_in_one_phase():
    spent = seconds_of(make_record("a.0", result=make_summary(1.0)))
    assert vars(spent) == {"waiting": 1, "starting": 1, "model": 3, "own": 4, "publishing": 1, "lost": 0}
    adopted = seconds_of(make_record("a.0", accepted_at=None, result=make_summary(1.0)))  # by an earlier manager
    assert vars(adopted) == {"waiting": 1, "starting": 0, "model": 3, "own": 4, "publishing": 2, "lost": 0}
    lost = seconds_of(make_record("a.0", outcome=Outcome.INFRA_ERROR))
    assert vars(lost) == {"waiting": 1, "starting": 1, "model": 0, "own": 0, "publishing": 0, "lost": 8}
    never = seconds_of(make_record("a.0", outcome=Outcome.CANCELLED, invoked_at=None, accepted_at=None))
    assert vars(never)["waiting"] == never.total == 10
    before = seconds_of(make_record("a.0", invoked_at=None, accepted_at=None, result=make_summary(1.0)))
    assert before.total == 0  # it had ended before the trainer's restart
    lost_twice = {"outcome": Outcome.INFRA_ERROR, "attempts": 3, "planned_at": 90.0, "first_invoked_at": 91.0}
    again = seconds_of(make_record("a.0", **lost_twice))
    assert (again.waiting, again.lost) == (1, 18)  # dead containers are no wait for an invoke
    # A container's clock that runs fast adds no time.
    assert seconds_of(make_record("a.0", result=make_summary(1.0, agent_s=60.0, model_s=50.0))).total == 10


def test_session_time_of_untrained_rollouts_is_counted():
    records = [
        make_record("a.0", result=make_summary(1.0), trainable=True),
        make_record("a.1", outcome=Outcome.INFRA_ERROR),
        make_record("b.0", result=make_summary(1.0), trainable=True, group_usable=False),
    ]
    numbers = summarize(records)
    assert (numbers.spent.session, numbers.wasted_session_s) == (27, 18)
    assert numbers.reward is not None
    assert (numbers.reward.value, numbers.reward.margin) == (1.0, None)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of 4 steps, with its report."""
    run = make_run(tmp_path_factory.mktemp("runs") / "t", MadeRun(tasks=6, group=4, steps=4, skill=0.1, lost=0.2))
    write_report(run)
    return run


def test_each_step_has_a_row_with_its_numbers_and_a_link_to_its_page(training: Path):
    page = Page(training / "report.html")
    text = page.text("steps")
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a" and "html" in str(attributes["href"])]
    assert len(set(links)) == 4
    for step in range(4):
        records = RunArchive(training).read_records(step)
        known = [record.reward for record in records if record.reward is not None]
        completed = sum(record.outcome == "completed" for record in records)
        assert f"step {step} {fmean(known):.3g} " in text
        assert f"{completed} / 24" in text
        below = Page(training / f"report/{step:08d}.html")
        assert below.data["id"] == [record.rollout_id for record in records]
        assert ("a", {"href": "../report.html"}) in below.tags


def test_a_page_of_a_step_that_did_not_change_is_kept(training: Path):
    page = training / "report" / "00000001.html"
    page.write_text("kept")
    write_report(training)
    assert page.read_text() == "kept"
    records = training / "steps" / "00000001.rollouts.jsonl"
    os.utime(records, (page.stat().st_mtime + 10,) * 2)
    write_report(training)
    assert page.read_text().startswith("<!doctype html>")


def test_a_runtime_on_this_machine_is_called_emulated(made: Path):
    run = read_run(made)
    for url, name in ((None, "agentcore"), ("http://127.0.0.1:4000/secret", "agentcore, emulated")):
        runtime = AgentCoreConfig(arn=ARN.format(region="us-east-1"), endpoint_url=url)
        config = run.config.model_copy(update={"runtime": runtime})
        assert step_context(replace(run, config=config), run.steps[0])["runtime"] == name


def test_cache_hits_keep_their_axis_beside_a_rate_of_up_to_100(made: Path):
    """An equal top of both lines, 100 tokens per second and 100 %, hid the axis of percentages."""
    chart = throughput(RunArchive(made).read_records(0))
    chart["lines"] = [line._replace(top=100.0) for line in chart["lines"]]
    drawn = report._environment().get_template("pictures.html").module.series(chart, "rates")  # type: ignore[attr-defined]
    assert ">100 %</text>" in drawn


def test_the_secret_path_of_a_local_cloud_is_not_shown():
    runtime = AgentCoreConfig(
        arn=ARN.format(region="us-east-1"), endpoint_url="http://127.0.0.1:4000/0123456789abcdef"
    )
    assert ("endpoint_url", "http://127.0.0.1:4000") in changed_settings(runtime)


@pytest.mark.parametrize(
    ("validations", "held_out"),
    [
        ((), ""),
        ((0.25,), "; held-out reward 0.25"),
        ((0.25, 0.75), "; held-out reward 0.25 to 0.75 in 2 validations"),
    ],
)
def test_a_training_says_what_was_learned(tmp_path: Path, validations: tuple[float, ...], held_out: str):
    steps = [(1000, [0.0, 0.5, 1.0]), (2000, [1.0, 1.0, 0.25])]
    held = [(1500 + 1000 * number, [reward]) for number, reward in enumerate(validations)]
    page = write_report(write_training(tmp_path / "run", *steps, *held)).read_text()
    solved = "tasks always solved: 1 of 3 in the first step, 2 of 3 in the last"
    assert f'<p class="learned">reward 0.5 to 0.75 in 2 steps; {solved}{held_out}</p>' in page


@pytest.mark.parametrize(
    ("idle", "badge"),
    [
        ((), ' good">✓ 7 of 7'),
        ((2, 4, 5, 6, 7), '">2 of 7'),
        ((1, 2, 3, 4, 5, 6, 7), ' bad">✗ 0 of 7'),
    ],
)
def test_findings_that_many_steps_have_are_one(tmp_path: Path, idle: tuple[int, ...], badge: str):
    archive = RunArchive(tmp_path / "run")
    for step in range(1, 8):
        doomed = (Outcome.CANCELLED, "group_doomed")
        result = make_step({"a.0": 1.0, "a.1": float(step in idle), "b.0": doomed}, step=step)
        archive.write_records(step, result.records)
        archive.write_report(result.report)
    archive.close()
    page = Page(write_report(tmp_path / "run"))
    assert f'<div class="badge{badge} steps had something to train on</div>' in page.html
    assert page.html.count("nothing to train on: ") == min(1, len(idle))
    assert ("steps 2, 4 to 7</a>: " in page.html) is (len(idle) == 5)
    assert WORDS["group_doomed"] in {each["title"] for _, each in page.tags if each.get("href") == "#words"}
