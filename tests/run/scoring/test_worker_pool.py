"""The scorer's processes."""

import asyncio

import msgpack
import pytest

from builders import eventually, is_running, skip
from rollout_backend.config import ScoringConfig
from rollout_backend.errors import ConfigError
from rollout_backend.run.scoring.scorer import ScoringError, load_scorer
from rollout_backend.run.scoring.worker import score_async
from rollout_backend.run.scoring.worker_pool import WorkerPool
from rollouts import make_rollout

TIMEOUT_S = 305  # the default of scoring.timeout_s, and what a process has in addition

SCORER = """
import os, subprocess, time
from pathlib import Path

def score(given):
    print("a line of the scorer")
    match given.private["do"]:
        case "hang":
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            Path(given.private["file"]).write_text(f"{os.getpid()} {child.pid}")
            time.sleep(600)
        case "exit":
            os._exit(3)
        case "raise":
            raise LookupError("no such answer")
        case "raise text":
            raise LookupError("no \\ud800")
        case "large":
            return {"reward": 0.5, "hash": 2**70}
    return {"reward": 0.5, "pid": os.getpid()}
"""


def request(**private: str) -> bytes:
    return msgpack.packb({"task_id": "t", "payload": {}, "private": private, "result": make_rollout("t.0").encode()})


def hangs(pids) -> bool:
    return pids.exists() and " " in pids.read_text()


async def test_a_process_is_kept_until_it_fails_and_replaced(tmp_path):
    file, log = tmp_path / "scorer.py", tmp_path / "logs" / "scorer.log"
    file.write_text(SCORER)
    pool = WorkerPool(ScoringConfig(function=f"{file}:score", processes=1), log)
    await pool.start()
    try:
        first = await pool.call(request(do="score"))
        assert (first["reward"], first["scorer"], first["sha256"]) == (0.5, "score", pool.sha256)
        answer = await pool.call(request(do="raise"))
        assert "LookupError: no such answer (scorer.py, line" in answer["error"]
        assert "LookupError: no ? (scorer.py" in (await pool.call(request(do="raise text")))["error"]
        assert "'hash' cannot be stored as JSON" in (await pool.call(request(do="large")))["error"]
        assert await pool.call(request(do="score")) == first, "it is the same process"
        hanging = asyncio.create_task(pool.call(request(do="hang", file=str(tmp_path / "pids"))))
        await eventually(lambda: hangs(tmp_path / "pids"))
        skip(TIMEOUT_S)
        with pytest.raises(ScoringError, match=r"took longer than scoring.timeout_s=300"):
            await hanging
        hung = (tmp_path / "pids").read_text().split()
        with pytest.raises(ScoringError, match=r"process ended with 3; its output is in logs/scorer.log"):
            await pool.call(request(do="exit"))
        assert "a line of the scorer" in log.read_text()
        file.write_text(SCORER + "\n")
        with pytest.raises(ScoringError, match="has changed since the run began"):
            await pool.call(request(do="score"))
    finally:
        await pool.close()
    await eventually(lambda: not any(is_running(pid) for pid in (*hung, str(first["extras"]["pid"]))))


COMMAND = """
case "$(cat)" in
*hang*) sleep 600 & echo "$ROLLOUT_ARTIFACTS" > folder; echo "$$ $!" > pids.new; mv pids.new pids; wait;;
esac
sleep 0.1
echo 1
"""


async def test_a_command_that_hangs_is_killed_by_the_pool_with_its_children(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pids = tmp_path / "pids"
    config = ScoringConfig(command=("sh", "-c", COMMAND), timeout_s=0.001)
    pool = WorkerPool(config, tmp_path / "scorer.log", kill_after_s=600.0)
    await pool.start()
    try:
        assert (await pool.call(request()))["reward"] == 1.0, "the process itself does not stop it"
        hanging = asyncio.create_task(pool.call(request(do="hang")))
        await eventually(pids.exists)
        skip(601.0)
        with pytest.raises(ScoringError, match=r"took longer than scoring.timeout_s=0\.001"):
            await hanging
        await eventually(lambda: not any(is_running(int(pid)) for pid in pids.read_text().split()))
        assert not (tmp_path / (tmp_path / "folder").read_text().strip()).exists()
    finally:
        await pool.close()


ASYNC_SCORER = """
import asyncio, os, sys, time
from types import SimpleNamespace

calls = SimpleNamespace(running=0, most=0, gate=asyncio.Event())

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    calls.running += 1
    calls.most = max(calls.most, calls.running)
    try:
        match ground_truth:
            case "wait for three":
                if calls.running == 3:
                    calls.gate.set()
                await calls.gate.wait()
            case "raise":
                raise LookupError("no such answer")
            case "exit in a task":
                await asyncio.gather(asyncio.to_thread(sys.exit, 3), asyncio.sleep(0))
            case "hang":
                await asyncio.Event().wait()
            case "block":
                print("blocks", flush=True)
                time.sleep(600)
    finally:
        calls.running -= 1
    return {"score": 0.5, "pid": os.getpid(), "most": calls.most}
"""


async def test_an_async_function_scores_several_rollouts_at_once_and_each_fails_alone(tmp_path):
    file, log = tmp_path / "reward.py", tmp_path / "scorer.log"
    file.write_text(ASYNC_SCORER)
    pool = WorkerPool(ScoringConfig(function=f"{file}:compute_score", processes=1, concurrency=3), log)
    await pool.start()
    try:
        found = await asyncio.gather(*(pool.call(request(ground_truth="wait for three")) for _ in range(7)))
        assert [each["reward"] for each in found] == [0.5] * 7
        assert max(each["extras"]["most"] for each in found) == 3, "never more than scoring.concurrency"
        [pid] = {each["extras"]["pid"] for each in found}

        cancelled = asyncio.create_task(pool.call(request(ground_truth="hang")))
        exited = await pool.call(request(ground_truth="exit in a task"))
        raised, good = await asyncio.gather(*(pool.call(request(ground_truth=what)) for what in ("raise", "score")))
        assert "SystemExit: 3" in exited["error"]
        assert "LookupError: no such answer (reward.py, line" in raised["error"]
        assert (good["reward"], good["extras"]["pid"]) == (0.5, pid), "the process goes on"
        cancelled.cancel()

        calls = [asyncio.create_task(pool.call(request(ground_truth=what))) for what in ("hang", "block")]
        await eventually(lambda: "blocks" in log.read_text())
        skip(TIMEOUT_S)
        blocked, innocent = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(blocked, ScoringError)
        assert isinstance(innocent, ScoringError)
        assert (await pool.call(request(ground_truth="score")))["extras"]["pid"] != pid
    finally:
        await pool.close()


async def test_an_async_function_that_hangs_is_cancelled(tmp_path):
    (tmp_path / "reward.py").write_text(ASYNC_SCORER)
    scorer = load_scorer(f"{tmp_path / 'reward.py'}:compute_score")
    answer = await score_async(scorer, request(ground_truth="hang"), 0.1)
    assert answer == {"error": "the scorer took longer than scoring.timeout_s=0.1"}


async def test_a_scorer_that_cannot_be_imported_is_refused(tmp_path):
    file = tmp_path / "scorer.py"
    file.write_text("import no_such_module")
    pool = WorkerPool(ScoringConfig(function=f"{file}:score"), tmp_path / "scorer.log")
    with pytest.raises(ConfigError, match=r"scoring: .*No module named 'no_such_module'"):
        await pool.start()
    await pool.close()


@pytest.mark.slow
async def test_the_process_ends_with_its_parent(tmp_path):
    """As if the trainer was killed: the pipe is closed, and nobody kills the process."""
    file = tmp_path / "scorer.py"
    file.write_text(SCORER)
    pool = WorkerPool(ScoringConfig(function=f"{file}:score"), tmp_path / "scorer.log")
    await pool.start()
    calling = asyncio.create_task(pool.call(request(do="hang", file=str(tmp_path / "pids"))))
    await eventually(lambda: hangs(tmp_path / "pids"))
    pids = (tmp_path / "pids").read_text().split()
    assert all(is_running(pid) for pid in pids)
    [worker] = pool._workers
    worker._process.stdin.close()
    with pytest.raises(ScoringError):
        await calling
    await eventually(lambda: not any(is_running(pid) for pid in pids))
    await pool.close()
