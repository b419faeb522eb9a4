"""Logs for Inspect, read by Inspect itself in the environment that `make clients` prepares."""

import base64
import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent_wrapper.contract import ImageSpan, Outcome
from builders import assistant, function_call, tool_result, user
from made_runs import MadeRun, make_run
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.accounts.records import StepRecords
from rollouts import make_ledger, make_rollout, make_segment

BIN = Path(__file__).parents[2] / ".venv-clients" / "bin"
pytestmark = [
    pytest.mark.slow,  # Inspect takes two seconds to import
    pytest.mark.skipif(not BIN.is_dir(), reason="no .venv-clients: run `make clients`"),
]

PIXEL = b"an image"
EXPORT_AND_READ = """
import json, sys
from inspect_ai.log import list_eval_logs, read_eval_log
from rollout_backend.cli import app
runs, folder = sys.argv[1:-1], sys.argv[-1]
for run in runs:
    for again in range(2):
        app(["export", run, "--to", "inspect", "--out", folder], standalone_mode=False)
found = [(info.task, read_eval_log(info, resolve_attachments=True)) for info in list_eval_logs(folder)]
print(json.dumps([{"listed_as": task, **log.model_dump(mode="json")} for task, log in found]))
"""


def odd_run(run: Path, at: float = 1000.0) -> Path:
    """Write an interrupted step: a rollout with odd messages, one without tokens, one without a result."""
    name = hashlib.sha256(PIXEL).hexdigest()
    picture = {"type": "image_url", "image_url": {"url": f"sha256:{name}"}}
    first = make_segment(4, 2).model_copy(
        update={
            "images": (ImageSpan(start=0, end=1, sha256=name, media_type="image/png"),),
            "messages": (
                {"role": "developer", "content": "Answer."},
                user([{"type": "text", "text": "What is this?"}, picture, {"type": "audio"}]),
                assistant(None, reasoning_content="Hm.", tool_calls=[function_call("look", "{broken"), "nonsense"]),
                tool_result("c1", "a cat"),
            ),
        }
    )
    second = make_segment(3, 1).model_copy(update={"messages": (user("Summary?"), assistant("A cat."))})
    rollouts = [
        make_rollout("odd.0", segments=[first, second], images={name: PIXEL}),
        make_rollout("odd.1", segments=[second]),
    ]
    archive, ledger = RunArchive(run), make_ledger(0, lambda: at)
    for i in range(3):
        ledger.plan(f"odd.{i}", "odd")
    for rollout in rollouts:
        ledger.entries[rollout.rollout_id].deliver(rollout.outcome, trainable=True)
        archive.write_rollout(rollout, rollout.encode())
    archive.write_records(0, StepRecords(ledger, lambda entry: "", rollouts).all())
    archive.tasks_file(0).write_text('{"task_id": "odd", "payload": {"question": "What?"}}\n')
    archive.close()
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run_a", MadeRun(tasks=5, group=4, lost=0.4, steps=2))


@pytest.fixture(scope="module")
def logs(run: Path) -> dict[str, dict[str, Any]]:
    """Return what Inspect reads of the logs of two runs, which were exported twice, by the tasks that it lists."""
    command = [BIN / "python", "-c", EXPORT_AND_READ, run, odd_run(run.parent / "odd"), run.parent / "logs"]
    read = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return {log["listed_as"]: log for log in json.loads(read.stdout.splitlines()[-1])}


def test_inspect_reads_a_log_for_each_step(run: Path, logs):
    assert sorted(logs) == ["odd-step-0", "run-a-step-0", "run-a-step-1"]
    records = RunArchive(run).read_records(1)
    log = logs["run-a-step-1"]
    assert (log["status"], log["eval"]["task"], log["eval"]["run_id"]) == ("success", "run_a step 1", "run_a")
    assert log["eval"]["dataset"]["samples"] == 5
    assert log["eval"]["config"]["epochs"] == 4
    assert log["eval"]["metadata"]["settings"]["group.size"] == "4"
    rewards = [record.reward for record in records if record.reward is not None]
    [score] = log["results"]["scores"]
    assert score["metrics"]["mean"]["value"] == pytest.approx(sum(rewards) / len(rewards))
    assert (score["scored_samples"], score["unscored_samples"]) == (len(rewards), 20 - len(rewards))
    [usage] = log["stats"]["model_usage"].values()
    sampled = sum(record.result.sampled_tokens for record in records if record.result)
    prompts = sum(record.result.prompt_tokens for record in records if record.result)
    assert (usage["output_tokens"], usage["total_tokens"]) == (sampled, sampled + prompts)
    assert usage["input_tokens"] + usage["input_tokens_cache_read"] == prompts


def test_each_rollout_is_an_epoch_of_its_task(run: Path, logs):
    records = RunArchive(run).read_records(1)
    samples = logs["run-a-step-1"]["samples"]
    assert len({(sample["id"], sample["epoch"]) for sample in samples}) == 20
    by_rollout = {sample["metadata"]["rollout_id"]: sample for sample in samples}
    for record in records:
        sample = by_rollout[record.rollout_id]
        assert (sample["id"], sample["uuid"]) == (record.task_id, f"run_a/1/{record.rollout_id}")
        assert sample["metadata"]["session_ids"] == list(record.session_ids)
        if record.reward is None:
            assert sample["scores"] is None
        else:
            assert sample["scores"]["reward"]["value"] == record.reward
            assert sample["scores"]["reward"]["metadata"].keys() == {"expected", "read"}
        if record.outcome is Outcome.COMPLETED:
            assert sample["error"] is None
            assert sample["output"]["completion"] == sample["messages"][-1]["content"]
            assert [each["event"] for each in sample["events"]] == ["span_begin", "model", "model", "span_end"]
            assert [each["role"] for each in sample["input"]] == ["system", "user"]
            first, second = (each for each in sample["events"] if each["event"] == "model")
            assert [each["role"] for each in second["input"]] == ["system", "user", "assistant", "tool"]
            assert first["output"]["choices"][0]["message"]["tool_calls"][0]["function"] == "price"
            assert second["timestamp"] == first["completed"]
            [total] = sample["model_usage"].values()
            assert total["output_tokens"] == sum(each["output"]["usage"]["output_tokens"] for each in (first, second))
        else:
            assert sample["error"]["message"].startswith(f"{record.outcome}: {record.reason}: ")
    assert {record.outcome for record in records} > {Outcome.COMPLETED, Outcome.INFRA_ERROR, Outcome.TIMED_OUT}
    assert any("JSONDecodeError" in (sample["error"] or {}).get("traceback", "") for sample in samples)


def test_odd_messages_several_conversations_and_an_interrupted_step(logs):
    log = logs["odd-step-0"]
    assert log["status"] == "cancelled"
    many, _, lost = log["samples"]
    assert [each["role"] for each in many["messages"]] == ["system", "user", "assistant", "tool"]
    _, picture, other = many["messages"][1]["content"]
    assert picture["image"] == f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}"
    assert other["text"] == "[audio]"
    reply = many["messages"][2]
    assert reply["content"][0]["reasoning"] == "Hm."
    assert [call["arguments"] for call in reply["tool_calls"]] == [
        {"arguments": "{broken"},
        {"arguments": "nonsense"},
    ]
    assert reply["tool_calls"][0]["parse_error"]
    assert [event["name"] for event in many["events"] if event["event"] == "span_begin"] == [
        "conversation 0: first_call",
        "conversation 1: first_call",
    ]
    assert lost["input"] == '{"question": "What?"}'
    assert lost["error"]["message"] == "the step was interrupted before this rollout ended"


def test_a_step_that_ran_again_replaces_its_log(tmp_path: Path):
    for at in (1000.0, 2000.0):
        export = [BIN / "python", "-m", "rollout_backend", "export", odd_run(tmp_path / "odd", at)]
        subprocess.run([*export, "--to", "inspect"], check=True, timeout=120)
    [log] = (tmp_path / "odd" / "inspect").iterdir()
    assert log.name.startswith("1970-01-01T00-33-20")
