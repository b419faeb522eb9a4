"""Inflict the same faults on this project and on others, and count what each loses, doubles, invents and leaves open.

    python benchmarks/faults.py

Each system runs one step of 8 groups of 4 rollouts, against S3, SQS and AgentCore by their wire protocols; a proxy
in front of them injects the faults of `fault_cases.py`, and the agents fail as `emulated_aws/faulty_agents.py` says.
True rewards are 0.25, 0.5 and 1, and each session has different tokens, so an invented reward and foreign tokens
show.

The first run installs the rivals from the package index: see `rivals/environments.py`. Their retries are on. All
systems have the same limit for an agent: 30 s, or 150 s where an outage takes a minute. See the scripts
`rivals/steps_by_*.py` for how each is used.

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

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from emulated_aws.agentcore import ARN
from emulated_aws.cloud import Cloud
from emulated_aws.faulty_agents import TOKENS, FaultyAgents
from fault_cases import BY_HTTP, BY_NAME, BY_S3, CASES, LIGHTNING, OURS, OUTAGE_S, SYSTEMS, Case
from rivals.environments import RivalFailed, environment, python_of, tail, version_of
from run_all import write_section

from rollout_backend.serving.server_process import free_port
from rollout_backend.testing.fault_proxy import FaultProxy

HERE = Path(__file__).parent
GROUPS, GROUP = 8, 4
LIMIT_S = 30.0  # of one agent
LIMIT_IN_OUTAGES_S = 150.0
HUNG_S = 300.0  # a step that takes longer hangs
SECRET = "the secret of a fault test, 32 characters"
PACKAGES = {BY_S3: "agentcore-rl-toolkit", BY_HTTP: "agentcore-rl-toolkit", LIGHTNING: "agentlightning"}
SCRIPTS = {OURS: "us", BY_S3: "toolkit", BY_HTTP: "toolkit", LIGHTNING: "agentlightning"}


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


def count(truths: Iterable[Truth], rollouts: Iterable[dict[str, Any]]) -> dict[str, int]:
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


class FaultyCloud(Cloud):
    def __init__(self, fault: str) -> None:
        super().__init__(s3_s=0.01, sqs_s=0.005)
        self.agents: FaultyAgents = FaultyAgents(self.s3, self.sqs, fault, SECRET, GROUPS * GROUP // 2)

    def control(self, name: str) -> Any:
        return list(self.agents.sessions)


def limit_of(case: Case) -> float:
    return LIMIT_IN_OUTAGES_S if case.outage else LIMIT_S


async def trainer(system: str, asked: dict[str, Any], log: Path) -> asyncio.subprocess.Process:
    with log.open("ab") as errors:
        return await asyncio.create_subprocess_exec(
            str(python_of(PACKAGES[system])) if system in PACKAGES else sys.executable,
            str(HERE / "rivals" / f"steps_by_{SCRIPTS[system]}.py"),
            json.dumps(asked),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=environment(ours=system == OURS),
            limit=2**24,
        )


async def read(process: asyncio.subprocess.Process, log: Path) -> Seen:
    """Return what a trainer prints until it has ended. One that hangs is killed."""
    seen = Seen()
    try:
        async with asyncio.timeout(HUNG_S):
            assert process.stdout is not None
            async for line in process.stdout:
                if line.startswith(b"{"):
                    made = json.loads(line)
                    if "ended" in made:
                        seen.notes = made["ended"]
                    else:
                        seen.rollouts.append(made)
            await process.wait()
    except TimeoutError:
        seen.error = "hung"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if not seen.error and (process.returncode or seen.notes is None):
        seen.error = last_line(log)
    return seen


def last_line(log: Path) -> str:
    """Return the exception that ended a trainer, without its module."""
    lines = tail(log.read_text(errors="replace")).splitlines() or ["it ended without a word"]
    name, colon, message = lines[-1].partition(":")
    return (name.rpartition(".")[2] + colon + message)[:100]


async def attend(system: str, case: Case, asked: dict[str, Any], log: Path, half: asyncio.Event) -> Seen:
    """Run a trainer to its end. If the case says so, kill it at `half`, and start it again."""
    process = await trainer(system, asked, log)
    if case.kill:
        try:
            await asyncio.wait_for(half.wait(), HUNG_S)
        finally:
            process.kill()
            await process.wait()
        process = await trainer(system, asked, log)
    return await read(process, log)


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


async def run_on_aws(system: str, case: Case, folder: Path) -> dict[str, Any]:
    cloud, log = FaultyCloud(case.name), folder / "trainer.log"
    async with cloud.serve() as engine, contextlib.aclosing(cloud.agents), FaultProxy(engine) as proxy:
        asked = {
            "url": proxy.url,
            "engine": engine,
            "arn": ARN,
            "groups": GROUPS,
            "group": GROUP,
            "limit_s": limit_of(case),
            "secret": SECRET,
            "folder": str(folder),
            "kind": "http" if system == BY_HTTP else "s3",
        }
        began = time.monotonic()
        faults = asyncio.create_task(outage(case, system, proxy, cloud.agents.begun))
        try:
            seen = await attend(system, case, asked, log, cloud.agents.half)
            if case.restart and seen.error:
                await faults
                seen = replace(
                    await read(await trainer(system, asked, log), log), error=f"started again after {seen.error}"
                )
        finally:
            faults.cancel()
        seconds = time.monotonic() - began
        sessions = cloud.agents.sessions
        for rollout in seen.rollouts:
            if "session" in rollout:  # the trainer's gateway has kept its tokens
                rollout["tokens"] = [TOKENS * sessions[rollout["session"]].proof]
        truths = [Truth(each.proof, each.group, each.reward, each.finished) for each in sessions.values()]
        leaked = sum(session.open for session in sessions.values())
    return {**count(truths, seen.rollouts), "leaked": leaked, **_end(seen, seconds)}


async def run_lightning(system: str, case: Case, folder: Path) -> dict[str, Any]:
    port, log = free_port(), folder / "trainer.log"
    truths: dict[int, Truth] = {}
    running: set[int] = set()
    half = asyncio.Event()
    begun = asyncio.Event()
    async with FaultProxy(f"http://127.0.0.1:{port}") as proxy:
        asked = {"port": port, "groups": GROUPS, "group": GROUP, "limit_s": limit_of(case)}
        began = time.monotonic()
        agents = await trainer(
            system, {**asked, "url": proxy.url, "agents": True, "fault": case.name}, folder / "agents.log"
        )

        async def listen() -> None:
            assert agents.stdout is not None
            async for line in agents.stdout:
                if not line.startswith(b'{"event"'):
                    continue
                said = json.loads(line)
                event = said.pop("event")
                begun.set()
                if event == "begun":
                    running.add(said["proof"])
                if event == "gone":
                    running.discard(said["proof"])
                else:
                    truths[said["proof"]] = Truth(**said, finished=event == "finished")
                if sum(truth.finished for truth in truths.values()) >= GROUPS * GROUP // 2:
                    half.set()

        tasks = [asyncio.create_task(listen()), asyncio.create_task(outage(case, system, proxy, begun))]
        try:
            seen = await attend(system, case, asked, log, half)
            seconds, leaked = time.monotonic() - began, len(running)
        finally:
            for task in tasks:
                task.cancel()
            if agents.returncode is None:
                agents.kill()
                await agents.wait()
    return {**count(truths.values(), seen.rollouts), "leaked": leaked, **_end(seen, seconds)}


def _end(seen: Seen, seconds: float) -> dict[str, Any]:
    return {"ended": seen.error or "yes", "missing": seen.notes or {}, "seconds": round(seconds, 1)}


# --- the matrix ------------------------------------------------------------------------------------------------


async def one(system: str, case: Case, work: Path | None) -> dict[str, Any]:
    head = {"fault": case.name, "system": system}
    if system in case.missing:
        return {**head, "not_applicable": case.missing[system]}
    run = run_lightning if system == LIGHTNING else run_on_aws
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if work is None else work / f"{case.name}-{SCRIPTS[system]}-{SYSTEMS.index(system)}"
        folder.mkdir(parents=True, exist_ok=True)
        return {**head, **await run(system, case, folder)}


async def matrix(
    systems: Iterable[str],
    cases: Iterable[Case],
    jobs: int,
    work: Path | None,
    done: Callable[[dict[str, Any]], None],
) -> None:
    free = asyncio.Semaphore(jobs)

    async def limited(system: str, case: Case) -> None:
        async with free:
            done(await one(system, case, work))

    await asyncio.gather(*(limited(system, case) for case in cases for system in systems))


def line(found: dict[str, Any]) -> str:
    head = f"{found['fault']:18s} {found['system']:14s} "
    if "not_applicable" in found:
        return f"{head}n/a: {found['not_applicable']}"
    names = ("delivered", "lost", "duplicated", "invented", "foreign", "leaked", "again")
    counts = ", ".join(f"{name} {found[name]}" for name in names if found[name])
    return f"{head}{counts}; {found['seconds']:.0f} s, ended: {found['ended']} {found['missing'] or ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="*", choices=BY_NAME, help="default: all")
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, help="default: all")
    parser.add_argument("--jobs", type=int, default=2, help="steps at the same time; they wait most of the time")
    parser.add_argument("--work", type=Path, help="keep the folders of the runs here")
    parser.add_argument("--json", type=Path, help="write the counts to this file, or replace those in it")
    options = parser.parse_args()
    systems = options.systems or SYSTEMS
    try:
        for package in sorted({PACKAGES[system] for system in systems if system in PACKAGES}):
            python_of(package)
    except RivalFailed as error:
        sys.exit(f"a rival cannot be installed: {error}\nPass --systems {OURS} to run without the rivals.")
    cases = [BY_NAME[name] for name in options.faults] if options.faults else CASES
    began = time.monotonic()
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else None
    rows = {(row["fault"], row["system"]): row for row in known["results"]["rows"]} if known else {}
    before_s = known["seconds"] if known else 0

    def done(row: dict[str, Any]) -> None:
        print(line(row), flush=True)
        rows[row["fault"], row["system"]] = row
        if options.json is not None:
            seconds = before_s + time.monotonic() - began
            results = results_of(list(rows.values()))
            write_section(options.json, "faults", "python benchmarks/faults.py", seconds, results)

    asyncio.run(matrix(systems, cases, options.jobs, options.work, done))


def results_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "versions": {system: version_of(package) for system, package in PACKAGES.items()},
        "settings": {
            "groups": GROUPS,
            "group": GROUP,
            "limit_s": LIMIT_S,
            "limit_in_outages_s": LIMIT_IN_OUTAGES_S,
            "outage_s": OUTAGE_S,
        },
        "cases": {case.name: case.title for case in CASES},
        "rows": rows,
    }


if __name__ == "__main__":
    main()
