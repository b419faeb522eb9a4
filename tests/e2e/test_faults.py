"""Whole runs while S3, SQS, agents, router, engines, clock or credentials fail.

Everything except the model is a real process. S3 and SQS are moto, or the emulator at $ROLLOUT_TEST_EMULATOR (see
`tests/emulators/localstack.py`). Each test rolls out the same tasks, and the model answers by the prompt alone. So
the rows must equal those of an undisturbed run, or be missing with a reason.
"""

import asyncio
import inspect
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import yaml

from agent_wrapper.contract import PUT_HEADERS, Outcome
from builders import eventually, load_module
from rollout_backend.config import AwsConfig, StorageConfig, load_config
from rollout_backend.core.tasks import Task
from rollout_backend.errors import CredentialsExpired
from rollout_backend.manager import RolloutManager
from rollout_backend.model.serving.server_process import ServerProcess
from rollout_backend.run.accounts.step_report import StepResult
from rollout_backend.run.collect.presign import Presigner
from rollout_backend.testing.fault_proxy import Fault, FaultProxy, Rule
from rollout_backend.workbench.local.cloud import LocalRuntime, LocalStorage
from rollout_backend.workbench.local.scripted import ScriptedEngine
from rollout_backend.workbench.local.session_pool import EmulatorLimits
from rollouts import make_claims
from tests.e2e.conftest import BASE

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "examples" / "arithmetic" / "agent.py"
TASKS = [Task(f"t{i}", {"question": f"What is {i} + 4?", "answer": str(i + 4)}) for i in range(8)]
PLANNED = 16
EMULATOR = os.environ.get("ROLLOUT_TEST_EMULATOR")
Rows = dict[str, tuple[float | None, list[tuple[list[int], list[int], list[str]]]]]

TRAINER = """
import asyncio, json, sys
from pathlib import Path
from rollout_backend.config import load_config
from rollout_backend.manager import RolloutManager
from rollout_backend.core.tasks import read_tasks

async def main(folder):
    async with RolloutManager(load_config(folder / "settings.yaml")) as manager:
        for step in range(int(sys.argv[2])):
            while not (folder / f"go-{step}").exists():
                await asyncio.sleep(0.05)
            result = await manager.collect(read_tasks(folder / "tasks.jsonl"))
            ends = sorted(f"{one.outcome} {one.reason}" for one in result.failures)
            line = {"balanced": result.report.balanced, "rows": rows(result), "ends": ends}
            with (folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\\n")

asyncio.run(main(Path(sys.argv[1])))
"""
CLOCK = """
import os, time
real = time.time

def shifted():
    with open(os.environ["CLOCK"]) as file:
        return real() + float(file.read() or 0)

time.time = shifted
"""


class Model:
    """A model that answers by the prompt alone. `hold` keeps back all answers after the first few."""

    def __init__(self) -> None:
        self._asked = 0
        self._free = sys.maxsize
        self._let_go = threading.Event()
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(ROOT / "benchmarks")
            self._answer: Callable[[str], str] = load_module(ROOT / "benchmarks" / "kill_trainer.py").answer

    def __call__(self, prompt: str) -> str:
        self._asked += 1
        if self._asked > self._free:
            self._let_go.wait(600)
        return self._answer(prompt)

    def hold(self, after: int = 0) -> None:
        self._asked, self._free = 0, after
        self._let_go.clear()

    def let_go(self) -> None:
        self._free = sys.maxsize
        self._let_go.set()


class Emulator(LocalStorage):
    """An S3 and SQS emulator that is already running."""

    def __init__(self, url: str, run_dir: Path) -> None:
        super().__init__(run_dir=run_dir)
        self.endpoint_url = url
        self._folder = run_dir

    @property
    def environ(self) -> dict[str, str]:
        return {**super().environ, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}

    async def start(self) -> None:
        self._folder.mkdir(parents=True)
        (self._folder / "aws-config").write_text("[default]\n")
        async with self.s3() as s3:
            await s3.create_bucket(Bucket=self.bucket)

    async def stop(self) -> None:
        pass


@dataclass
class World:
    """The cloud, with one fault proxy for the agents and one for the trainer."""

    folder: Path
    storage: LocalStorage
    runtime: LocalRuntime
    agents: FaultProxy
    trainer: FaultProxy
    model: Model
    engines: list[ScriptedEngine]
    asked_before: int = 0

    def hold(self, after: int = 0) -> None:
        """Let the model answer `after` more calls, and no others until `model.let_go`."""
        self.asked_before += self.asked()
        self.model.hold(after)

    def asked(self) -> int:
        """Return the number of calls that have reached an engine since `hold`."""
        return sum(len(engine.requests) for engine in self.engines) - self.asked_before

    def tree(self, **more: Any) -> dict[str, Any]:
        return {
            **BASE,
            "serving": {"kind": "external", "urls": [engine.url for engine in self.engines]},
            "aws": {"region": self.storage.region, "endpoint_url": self.trainer.url},
            "storage": {"bucket": self.storage.bucket},
            "runtime": {
                "kind": "agentcore",
                "arn": self.runtime.arn,
                "endpoint_url": self.runtime.endpoint_url,
                "invoke_per_s": 100,
                "stop_per_s": 100,
                "read_timeout_s": 100,
            },
            "queue": {"wait_s": 1},
            "collect": {"list_after_idle_s": 2, "list_interval_s": 0.3},
            "output_dir": str(self.folder / "runs"),
            **more,
        }

    @asynccontextmanager
    async def run(self, run_id: str, **more: Any) -> AsyncIterator[RolloutManager]:
        config = load_config(base=self.tree(run_id=run_id, **more), env={})
        async with RolloutManager(config) as manager:
            yield manager

    @asynccontextmanager
    async def faults(self, *, agents: list[Rule] | None = None, trainer: list[Rule] | None = None) -> Any:
        """Apply fault rules in the block, and check that each of them was hit."""
        for proxy, rules in ((self.agents, agents), (self.trainer, trainer)):
            proxy.rules, proxy.calls = list(rules or ()), []
        try:
            yield
            for rule in (*self.agents.rules, *self.trainer.rules):
                assert rule.hits, f"{rule} was never hit"
        finally:
            self.agents.rules, self.trainer.rules = [], []

    async def nothing_is_open(self) -> bool:
        return (await self.runtime.sessions())["sessions"] == []


def rows(result: StepResult) -> Rows:
    """Return the trainable reward, tokens and logprobs by rollout."""
    return {
        r.rollout_id: (
            r.reward,
            [(list(s.token_ids), list(s.response_mask), list(map(str, s.logprobs))) for s in r.segments],
        )
        for r in result.rollouts
        if r.trainable
    }


async def same_as(calm: Rows, result: StepResult, world: World) -> None:
    report = result.report
    assert report.balanced, report
    assert report.planned == PLANNED
    assert report.outcomes[Outcome.COMPLETED] == PLANNED, report.reasons
    assert rows(result) == calm
    assert await world.nothing_is_open()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("faults")
    model = Model()
    with ScriptedEngine(model) as one, ScriptedEngine(model) as other, pytest.MonkeyPatch.context() as patch:
        place = folder / "cloud"
        made = Emulator(EMULATOR, place) if EMULATOR else LocalStorage(run_dir=place, any_key=True)
        async with made as storage:
            for name, value in storage.environ.items():
                patch.setenv(name, value)
            async with (
                FaultProxy(storage.endpoint_url, seed=1) as agents,
                FaultProxy(storage.endpoint_url, seed=2) as trainer,
            ):
                env = {**storage.environ, "AWS_ENDPOINT_URL": agents.url}
                limits = EmulatorLimits(grace_s=60.0)
                async with LocalRuntime(AGENT, run_dir=folder / "cloud", env=env, limits=limits) as runtime:
                    yield World(folder, storage, runtime, agents, trainer, model, [one, other])
        model.let_go()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def run(world: World) -> AsyncIterator[RolloutManager]:
    """The run in which each test disturbs a step. The run id is fixed, because faults are drawn by object names."""
    async with world.run("disturbed") as manager:
        yield manager


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def calm(world: World, run: RolloutManager) -> Rows:
    """The rows of an undisturbed step."""
    result = await run.collect(TASKS, step=0)
    assert result.report.outcomes[Outcome.COMPLETED] == PLANNED, result.failures
    return rows(result)


# --- S3 and SQS -------------------------------------------------------------------------------------------


async def test_s3_fails_on_both_sides(world: World, run: RolloutManager, calm: Rows) -> None:
    trainer = [Rule("s3:PutObject", Fault.FAIL, times=2, code="SlowDown")]
    trainer += [Rule("s3:*", Fault.FAIL, share=0.2, code="SlowDown"), Rule("s3:*", Fault.CUT_BEFORE, share=0.1)]
    agents = [
        Rule("s3:PutObject", Fault.FAIL, share=0.2, status=500, code="InternalError"),
        Rule("s3:PutObject", Fault.CUT_BEFORE, share=0.2),
    ]
    async with world.faults(agents=agents, trainer=trainer):
        await same_as(calm, await run.collect(TASKS, step=1), world)


@pytest.mark.skipif(not EMULATOR, reason="moto checks no signature")
async def test_a_presigned_url_permits_only_what_was_signed(world: World) -> None:
    storage = StorageConfig(bucket=world.storage.bucket)
    where = AwsConfig(region=world.storage.region, endpoint_url=world.trainer.url)
    claims = make_claims(rollout_id="a.0")
    async with aclosing(Presigner(storage, where)) as presigner:
        url = (await presigner.urls(claims)).result
        for_a_second = claims.model_copy(update={"expires_at": 0.0})
        short = (await presigner.urls(for_a_second)).failure_marker

    async def put(url: str, **headers: str) -> int:
        async with httpx.AsyncClient(timeout=60) as http:
            return (await http.put(url, content=b"x", headers={**PUT_HEADERS, **headers})).status_code

    signed = time.monotonic()
    assert await put(url.replace("/a.0", "/b.0")) == 403
    assert await put(url, **{"If-None-Match": "other"}) == 403
    assert await put(url) == 200
    assert await put(url) == 412
    await eventually(lambda: time.monotonic() > signed + 2)
    assert await put(short) == 403


# --- processes --------------------------------------------------------------------------------------------


async def test_killed_agents_are_detected_by_missing_heartbeats(world, calm, caplog):
    """The agents' deadline is hours away, so only missing heartbeats can end the test."""
    long = {"agent_s": 7000, "collection_s": 8000, "session_key_s": 9000, "heartbeat_s": 6}
    async with world.run("shot", timeouts={**BASE["timeouts"], **long}) as manager:
        world.hold()
        collecting = asyncio.create_task(manager.collect(TASKS))
        await eventually(lambda: world.asked() == PLANNED)
        open_sessions = [session["id"] for session in (await world.runtime.sessions())["sessions"]]
        for session_id, number in zip(
            random.Random(1).sample(open_sessions, 3), (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP), strict=True
        ):
            await world.runtime.kill(session_id, number)
        world.model.let_go()
        result = await collecting
    await same_as(calm, result, world)
    assert result.report.attempts == PLANNED + 3
    assert caplog.text.count("stopped sending heartbeats") == 3


# --- the clock --------------------------------------------------------------------------------------------


async def test_a_step_survives_clock_jumps_of_the_trainer(world: World, calm: Rows, tmp_path: Path) -> None:
    """The clock jumps by six hours. Trainer and gateway share that clock; agents keep the right one."""
    clock, done = tmp_path / "clock", tmp_path / "steps.jsonl"
    hours = {"right": 0, "ahead": 6, "behind": -6}
    tasks = [json.dumps({"task_id": task.task_id, "payload": task.payload}) for task in TASKS[:4]]
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(CLOCK)
    (tmp_path / "trainer.py").write_text(f"from __future__ import annotations\n{inspect.getsource(rows)}{TRAINER}")
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(world.tree(run_id="clock")))
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks))
    done.touch()
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "hook"), "CLOCK": str(clock)}
    command = [sys.executable, str(tmp_path / "trainer.py"), str(tmp_path), "4"]
    trainer = ServerProcess("the trainer", command, tmp_path / "trainer.log", env)

    def turn(which: str) -> None:
        part = clock.with_suffix(".new")
        part.write_text(str(3600 * hours[which]))
        part.replace(clock)

    def steps_written() -> list[dict[str, Any]]:
        assert trainer.running or trainer.returncode == 0, trainer.log_tail()
        return [json.loads(line) for line in done.read_text().splitlines()]

    async def step(begin: str, *then: str) -> dict[str, Any]:
        """Run a step that starts at the first of these times; the others follow while agents wait for the model."""
        number = len(steps_written())
        turn(begin)
        world.hold()
        (tmp_path / f"go-{number}").touch()
        await eventually(lambda: len(steps_written()) > number or world.asked() == 8)
        for which in then:
            turn(which)
        world.model.let_go()
        await eventually(lambda: len(steps_written()) > number)
        assert await world.nothing_is_open()
        line = steps_written()[number]
        assert line.pop("balanced")
        return line

    turn("right")
    mine = tuple(f"{task.task_id}." for task in TASKS[:4])
    rows_then = {key: row for key, row in json.loads(json.dumps(calm)).items() if key.startswith(mine)}
    whole = {"rows": rows_then, "ends": []}
    await trainer.start()
    try:
        assert await step("right", "ahead", "behind", "right") == whole
        assert await step("ahead", "right") == whole
        # By the gateway's clock the agents' keys have expired.
        assert await step("right", "ahead") == {"rows": {}, "ends": ["infra_error trajectory_unavailable"] * 8}
        # The agents' deadline is sent as a duration.
        assert await step("behind") == whole
    finally:
        await trainer.stop()


# --- credentials ------------------------------------------------------------------------------------------


async def test_expired_credentials_end_the_run_and_new_ones_resume_it(world, calm):
    async with world.run("expired") as manager:
        world.hold(after=4)
        collecting = asyncio.create_task(manager.collect(TASKS))

        async def four_are_in() -> bool:
            return sum((await manager.progress()).outcomes.values()) >= 4

        await eventually(four_are_in)
        async with world.faults(trainer=[Rule("*", Fault.FAIL, status=400, code="ExpiredToken")]):
            with pytest.raises(CredentialsExpired, match="aws sso login"):
                await asyncio.wait_for(collecting, 120)
        assert await world.nothing_is_open()
        world.model.let_go()
    async with world.run("expired") as manager:
        result = await manager.collect(TASKS, step=0)
    assert result.report.resumed == 4
    await same_as(calm, result, world)
