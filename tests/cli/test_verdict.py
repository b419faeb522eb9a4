"""`rollout run` ends with a verdict in words and a matching exit code."""

import json
import re
from pathlib import Path

import pytest

from agent_servers import serve_agent
from rollout_backend.workbench.local.scripted import Fail, Reply, ScriptedEngine


@pytest.fixture(scope="session")
def agent(storage, repository, tmp_path_factory):
    script = repository / "tests" / "cli" / "agent_by_payload.py"
    with serve_agent(script, storage, tmp_path_factory.mktemp("agent")) as url:
        yield url


def reply(prompt: str) -> Reply:
    if "do lost" in prompt:
        return Fail(400, "unknown sampling parameter")
    return "a long reply " * 9 if "do long" in prompt else "short"


@pytest.fixture
def run_groups(rollout, settings, agent, run_id, tmp_path):
    """Run one group for each list of actions. Return the exit code and the verdict."""

    def run(*groups: list[object], options: tuple[object, ...] = (), **sections) -> tuple[int, str]:
        tasks = tmp_path / "groups.jsonl"
        tasks.write_text("".join(json.dumps({"payload": {"do": do}}) + "\n" for do in groups))
        with ScriptedEngine(reply) as engine:
            config = settings(
                runtime={"kind": "http", "url": agent},
                serving={"kind": "external", "urls": [engine.url]},
                queue={"wait_s": 1},
                run_id=run_id,
                **{"group": {"size": len(groups[0])}, "sampling": {"max_tokens": 20}, **sections},
            )
            code, output = rollout("run", config, "--tasks", tasks, *options)
        found = re.search(r" [✓✗] (?P<verdict>.*) ledger .* report (?P<report>.*) again ", output)
        if found is None:
            return code, output
        assert Path(found["report"]).is_file()
        return code, found["verdict"]

    return run


def test_a_run_names_losses_of_every_kind_and_exits_with_3_if_too_few_rollouts_complete(
    rollout, run_groups, tmp_path, run_id, repository
):
    groups = [[0, 1], [1, 1], *([what, what] for what in ("long", "silent", "raise", "lost"))]
    code, verdict = run_groups(*groups, options=("--min-completed", 7), group={"size": 2, "min_viable": 1})
    assert verdict == (
        "6 of 12 rollouts completed, 3 of 6 groups usable "
        "! 6 of 12 rollouts completed, and at least 7 must complete "
        "! no model call made by 2 of 12 rollouts (rollout show task-00003.0) "
        "! 2 of 12 rollouts lost to the infrastructure, most often model_unavailable (2) (rollout show task-00005.0) "
        "! 2 of 12 rollouts failed in the agent, most often agent_exception (2) (rollout show task-00004.0); "
        "2 more in the report"
    )
    assert code == 3
    report = (tmp_path / "runs" / run_id / "report.html").read_text()
    assert "tasks always solved, and teach nothing: 2 of 3" in report
    assert "6 / 12" in report
    # The page shows this run.
    page = (repository / "docs" / "run-rollouts.md").read_text()
    output = rollout("show", tmp_path / "runs" / run_id)[1]
    quoted = re.findall(r"^  ! (.*?)(?: \(rollout show .*| *; \d+ more in the report)?$", page, re.MULTILINE)
    assert len(quoted) == 4
    assert [each for each in quoted if each not in output] == []

    shown = ("show", "task-00000.1", "--run", tmp_path / "runs" / run_id)
    code, output = rollout(*shown)
    assert code == 0
    for part in ("completed, reward 1", "do 1", "short", "mean logprob -0.500"):
        assert part in output
    assert json.loads(rollout(*shown, "--json")[1])["outcome"] == "completed"


def test_more_completed_rollouts_than_planned_cannot_be_asked_for(run_groups):
    code, output = run_groups([1], [1], options=("--min-completed", 3))
    assert code == 2
    assert "--min-completed=3 is more than the 2 rollouts that the run plans" in output
    assert "starting" not in output
