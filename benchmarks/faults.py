"""Inflict the same faults on this project and on others, and count what each loses, doubles, invents and leaves open.

    python benchmarks/faults.py

Each system runs one step of 8 groups of 4 rollouts, against S3, SQS and AgentCore by their wire protocols; a proxy
in front of them injects the faults of `fault_cases.py`, and the agents fail as `faulty_agents.py` says.
True rewards are 0.25, 0.5 and 1, and each session has different tokens, so an invented reward and foreign tokens
show.

The first run installs the rivals from the package index: see `rivals/environments.py`. Their retries are on. All
systems have the same limit for an agent: 30 s, or 150 s where an outage takes a minute. See `rivals/` for how each is
used.

- `delivered`: trained with the true reward and tokens, at most 4 of a group.
- `lost`: an agent finished, nothing was trained in its place.
- `duplicated`: trained twice, or beyond the group's size.
- `invented`: trained with another reward than the agent's, such as 0.
- `foreign`: trained with tokens that no session of the group has sampled.
- `leaked`: sessions that are open when the trainer has ended. An agentlightning agent has no session: it counts if it
  still runs.
- `again`: agents that ran although as many had already finished as their group needs.
- `ended`: whether the step ended by itself; otherwise, the exception, or that it hung.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Unmeasured, arguments, write_section
from emulated_aws import ARN, Cloud
from fault_cases import BY_HTTP, BY_NAME, BY_S3, CASES, LIGHTNING, OURS, OUTAGE_S, SYSTEMS, Case
from faulty_agents import TOKENS, FaultyAgents, Session, tokens_of
from rivals.environments import PACKAGES, command, environment, version_of

from rollout_backend.serving.server_process import free_port
from rollout_backend.testing.fault_proxy import FaultProxy

GROUPS, GROUP = 8, 4
LIMIT_S = 30.0  # of one agent
LIMIT_IN_OUTAGES_S = 150.0
HUNG_S = 300.0  # a step that takes longer hangs
SECRET = "the secret of a fault test, 32 characters"
PROGRAMS = {  # and the way in which each is used
    OURS: ("ours", "step_with_faults"),
    BY_S3: ("toolkit", "step_by_s3"),
    BY_HTTP: ("toolkit", "step_by_http"),
    LIGHTNING: ("lightning", "step_with_faults"),
}


@dataclass(frozen=True)
class Truth:
    """What one session, or one attempt of agentlightning, truly was."""

    proof: int
    group: str
    reward: float
    finished: bool


@dataclass
class Seen:
    """What a trainer printed."""

    rollouts: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, int] | None = None  # None: the step did not end
    error: str = ""


def count(truths: Iterable[Truth | Session], rollouts: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Compare what is trained with what is true."""
    by_proof = {truth.proof: truth for truth in truths}
    found: Counter[str] = Counter()
    delivered: dict[str, set[int]] = defaultdict(set)
    wrong: Counter[str] = Counter()
    for rollout in rollouts:
        group, tokens = rollout["group"], rollout["tokens"]
        truth = by_proof.get(tokens[0] // TOKENS) if tokens else None
        if truth is None or truth.group != group:
            found["foreign"] += 1
            wrong[group] += 1
        elif not truth.finished or rollout["reward"] != truth.reward:
            found["invented"] += 1
            wrong[group] += 1
        elif truth.proof in delivered[group] or len(delivered[group]) == GROUP:
            found["duplicated"] += 1
        else:
            delivered[group].add(truth.proof)
    finished = Counter(truth.group for truth in by_proof.values() if truth.finished)
    done = {group: len(proofs) for group, proofs in delivered.items()}
    return {
        "delivered": sum(done.values()),
        "lost": sum(max(0, min(GROUP, n) - done.get(group, 0) - wrong[group]) for group, n in finished.items()),
        "duplicated": found["duplicated"],
        "invented": found["invented"],
        "foreign": found["foreign"],
        "again": sum(max(0, n - GROUP) for n in finished.values()),
    }


# --- one step of one system ------------------------------------------------------------------------------------


@dataclass
class World:
    """The agents of a step, and what is true of them."""

    proxy: FaultProxy  # between the trainer or the agents and the services
    asked: dict[str, Any]  # more of the trainer's work
    begun: asyncio.Event  # the first agent has begun
    half: asyncio.Event  # half of the agents have finished
    truths: Callable[[], Iterable[Truth | Session]]
    count_open: Callable[[], int]  # sessions


class FaultyCloud(Cloud):
    def __init__(self, fault: str) -> None:
        super().__init__(s3_s=0.01, sqs_s=0.005, runtime_s=0.01)
        self.agents: FaultyAgents = FaultyAgents(self.s3, self.sqs, fault, SECRET, GROUPS * GROUP // 2)

    def control(self, name: str) -> Any:
        """Return the tokens that the trainer's gateway has of each session whose agent has called the model."""
        return {session.id: tokens_of(session.proof) for session in self.agents.sessions.values()}


@contextlib.asynccontextmanager
async def on_aws(case: Case, log: Path) -> AsyncIterator[World]:
    cloud = FaultyCloud(case.name)
    agents, sessions = cloud.agents, cloud.agents.sessions
    async with cloud.serve() as engine, contextlib.aclosing(agents), FaultProxy(engine) as proxy:
        asked = {"engine": engine, "arn": ARN, "secret": SECRET}
        count_open = lambda: sum(each.open for each in sessions.values())  # noqa: E731
        yield World(proxy, asked, agents.begun, agents.half, sessions.values, count_open)


@contextlib.asynccontextmanager
async def on_lightning(case: Case, log: Path) -> AsyncIterator[World]:
    """Run agentlightning's runners, which are a process that prints what is true."""
    port, begun, half = free_port(), asyncio.Event(), asyncio.Event()
    truths: dict[int, Truth] = {}
    running: set[int] = set()

    async def listen(runners: asyncio.subprocess.Process) -> None:
        async for event in events(runners):
            what = event.pop("event")
            begun.set()
            if what == "begun":
                running.add(event["proof"])
            if what == "gone":
                running.discard(event["proof"])
            else:
                truths[event["proof"]] = Truth(**event, finished=what == "finished")
            if sum(truth.finished for truth in truths.values()) >= GROUPS * GROUP // 2:
                half.set()

    async with FaultProxy(f"http://127.0.0.1:{port}") as proxy:
        work = {"way": "run_agents", "groups": GROUPS, "group": GROUP, "url": proxy.url, "fault": case.name}
        runners = await start("lightning", work, log)
        listening = asyncio.create_task(listen(runners))
        try:
            yield World(proxy, {"port": port}, begun, half, truths.values, lambda: len(running))
        finally:
            listening.cancel()
            await end(runners)


async def start(program: str, work: dict[str, Any], log: Path) -> asyncio.subprocess.Process:
    with log.open("ab") as errors:
        return await asyncio.create_subprocess_exec(
            *command(program),
            json.dumps(work),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=environment(program),
            limit=2**24,
        )


async def end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


async def events(process: asyncio.subprocess.Process) -> AsyncIterator[dict[str, Any]]:
    """Yield what a process prints as JSON until it has ended."""
    assert process.stdout is not None
    async for line in process.stdout:
        if line.startswith(b"{"):
            yield json.loads(line)
    await process.wait()


async def read(process: asyncio.subprocess.Process, log: Path) -> Seen:
    """Return what a trainer prints until it has ended. One that hangs is killed."""
    seen = Seen()
    try:
        async with asyncio.timeout(HUNG_S):
            async for made in events(process):
                if "ended" in made:
                    seen.notes = made["ended"]
                else:
                    seen.rollouts.append(made)
    except TimeoutError:
        seen.error = "hung"
    finally:
        await end(process)
    if not seen.error and (process.returncode or seen.notes is None):
        seen.error = last_line(log)
    return seen


def last_line(log: Path) -> str:
    """Return the exception that ended a trainer, without its module."""
    lines = log.read_text(errors="replace").splitlines() or ["it ended without a word"]
    name, colon, message = lines[-1].partition(":")
    return (name.rpartition(".")[2] + colon + message)[:100]


async def outage(case: Case, system: str, proxy: FaultProxy, begun: asyncio.Event) -> None:
    """Apply the case's rules: all the time, or for a minute once the step has begun."""
    rules = case.rules_of(system)
    if case.outage and not case.from_the_start:
        await begun.wait()
        await asyncio.sleep(1.5)  # the invokes are through
    proxy.rules = rules
    if case.outage:
        while not any(rule.hits for rule in rules):  # noqa: ASYNC110  # a rule has no event
            await asyncio.sleep(0.05)
        await asyncio.sleep(OUTAGE_S)
        proxy.rules = []


async def run(system: str, case: Case, folder: Path) -> dict[str, Any]:
    """Run a trainer to its end, and count. If the case says so, kill it at `half`, and start it again."""
    log, (program, way) = folder / "trainer.log", PROGRAMS[system]
    async with (on_lightning if system == LIGHTNING else on_aws)(case, folder / "agents.log") as world:
        limit_s = LIMIT_IN_OUTAGES_S if case.outage else LIMIT_S
        about = {"way": way, "groups": GROUPS, "group": GROUP, "limit_s": limit_s, "folder": str(folder)}
        work = {**about, "url": world.proxy.url, **world.asked}
        began = time.monotonic()
        faults = asyncio.create_task(outage(case, system, world.proxy, world.begun))
        try:
            process = await start(program, work, log)
            if case.kill:
                try:
                    await asyncio.wait_for(world.half.wait(), HUNG_S)
                finally:
                    await end(process)
                process = await start(program, work, log)
            seen = await read(process, log)
            if case.restart and seen.error:
                await faults
                error = f"started again after {seen.error}"
                seen = await read(await start(program, work, log), log)
                seen.error = error
        finally:
            faults.cancel()
        found = {**count(world.truths(), seen.rollouts), "leaked": world.count_open()}
        ended = {"ended": seen.error or "yes", "missing": seen.notes or {}}
        return found | ended | {"seconds": round(time.monotonic() - began, 1)}


# --- the matrix ------------------------------------------------------------------------------------------------


async def one(system: str, case: Case) -> dict[str, Any]:
    head = {"fault": case.name, "system": system}
    if system in case.missing:
        return {**head, "not_applicable": case.missing[system]}
    with tempfile.TemporaryDirectory() as folder:
        return {**head, **await run(system, case, Path(folder))}


async def matrix(systems: Iterable[str], cases: Iterable[Case], done: Callable[[dict[str, Any]], None]) -> None:
    free = asyncio.Semaphore(2)  # steps wait most of the time

    async def limited(system: str, case: Case) -> None:
        async with free:
            done(await one(system, case))

    await asyncio.gather(*(limited(system, case) for case in cases for system in systems))


def line(found: dict[str, Any]) -> str:
    head = f"{found['fault']:18s} {found['system']:14s} "
    if "not_applicable" in found:
        return f"{head}n/a: {found['not_applicable']}"
    names = ("delivered", "lost", "duplicated", "invented", "foreign", "leaked", "again")
    counts = ", ".join(f"{name} {found[name]}" for name in names if found[name])
    return f"{head}{counts}; {found['seconds']:.0f} s, ended: {found['ended']} {found['missing'] or ''}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--faults", nargs="*", choices=BY_NAME, default=list(BY_NAME))
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
    options = parser.parse_args()
    try:
        for system in options.systems:
            command(PROGRAMS[system][0])
    except Unmeasured as error:
        sys.exit(f"a rival cannot be installed: {error}\nPass --systems {OURS} to run without the rivals.")
    began, rows = time.monotonic(), []
    limits = {"limit_s": LIMIT_S, "limit_in_outages_s": LIMIT_IN_OUTAGES_S, "outage_s": OUTAGE_S}
    programs = {system: program for system, (program, _) in PROGRAMS.items() if program in PACKAGES}
    results = {
        "versions": {system: version_of(PACKAGES[program]) for system, program in programs.items()},
        "settings": {"groups": GROUPS, "group": GROUP, **limits},
        "cases": {case.name: case.title for case in CASES},
        "rows": rows,
    }

    def done(row: dict[str, Any]) -> None:
        print(line(row), flush=True)
        rows.append(row)
        write_section(options.json, "faults", "python benchmarks/faults.py", time.monotonic() - began, results)

    names = options.faults[:2] if options.smoke else options.faults
    asyncio.run(matrix(options.systems, [BY_NAME[name] for name in names], done))


if __name__ == "__main__":
    main()
