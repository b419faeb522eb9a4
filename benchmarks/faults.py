"""Inflict the same faults on this project and on others, and count what each loses, doubles, invents and leaves open.

    python benchmarks/faults.py

Each system runs one step of 8 groups of 4 rollouts. This project and its rivals on AWS use S3, SQS and AgentCore by
their wire protocols; a proxy in front of them, or of a system's own server, injects the faults of `fault_cases.py`.
The agents fail as `rivals/harness.py` says. docs/fault-bench.md says what the counts mean, and how to add a system.
"""

import asyncio
import contextlib
import json
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Table, Unmeasured, arguments, today, write_section
from emulated_aws import ARN
from fault_cases import BY_NAME, CASES, OURS, OUTAGE_S, SYSTEMS, Case, System
from faulty_agents import FaultyAgents
from rivals.environments import command, environment, version_of
from rivals.harness import TOKENS, Truth

from rollout_backend.model.serving.server_process import free_port
from rollout_backend.testing.fault_proxy import FaultProxy, Rule
from rollout_backend.workbench.local.scripted import BYTE_MODEL

GROUPS, GROUP = 8, 4
LIMIT_S = 30.0  # of one agent
LIMIT_IN_OUTAGES_S = 150.0
HUNG_S = 600.0  # a step that takes longer hangs
STOP_S = 30.0  # for a system's own servers
SECRET = "the secret of a fault test, 32 characters"


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


class World:
    """What is true of the agents of a step."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "truths.jsonl"
        self.file.touch()
        self._read = 0
        self.truths: dict[int, Truth] = {}
        # The first agent began, and half of them have finished.
        self.begun, self.half = asyncio.Event(), asyncio.Event()

    def note(self, truth: Truth) -> None:
        self.truths[truth.proof] = truth
        self.begun.set()
        if sum(each.finished for each in self.truths.values()) >= GROUPS * GROUP // 2:
            self.half.set()

    def read(self) -> None:
        """Note what agents in other processes have written."""
        with self.file.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if line.endswith(b"\n"):
                    self._read += len(line)
                    self.note(Truth(**json.loads(line)))

    async def follow(self) -> None:
        while True:
            self.read()
            await asyncio.sleep(0.05)

    def open_sessions(self) -> int:
        return sum(truth.open and Path(f"/proc/{truth.pid}").exists() for truth in self.truths.values())


@contextlib.asynccontextmanager
async def serving(system: System, world: World, work: dict[str, Any]) -> AsyncIterator[FaultProxy]:
    """Run what a system has beside its trainer behind a proxy, and complete the trainer's work."""
    if system.on_aws:
        cloud = FaultyAgents(work["fault"], SECRET, Path(work["folder"]), world.note)
        async with cloud.serve() as engine, contextlib.aclosing(cloud), FaultProxy(engine) as proxy:
            work |= {"url": proxy.url, "engine": engine, "arn": ARN, "secret": SECRET}
            yield proxy
        return
    port, following = free_port(), asyncio.create_task(world.follow())
    async with FaultProxy(f"http://127.0.0.1:{port}") as proxy:
        work |= {"url": proxy.url, "port": port}
        process = await start(system.program, {**work, "way": "run_agents"}, "agents") if system.beside else None
        try:
            if process is not None:
                await listening(port)
            yield proxy
            world.read()
        finally:
            following.cancel()
            if process is not None:
                await end(process, STOP_S)


async def listening(port: int) -> None:
    """Wait until a server listens on a port."""
    async with asyncio.timeout(HUNG_S):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.1)


async def start(program: str, work: dict[str, Any], name: str) -> asyncio.subprocess.Process:
    argv, folder = [*command(program), json.dumps(work)], Path(work["folder"])
    with (folder / f"{name}.log").open("ab") as errors, (folder / f"{name}.out").open("wb") as printed:
        return await asyncio.create_subprocess_exec(*argv, stdout=printed, stderr=errors, env=environment(program))


async def end(process: asyncio.subprocess.Process, grace_s: float = 0.0) -> None:
    """Stop a process, and kill it if it takes longer."""
    if process.returncode is None and grace_s:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()


@dataclass
class Trainer:
    """A program that trains, and what it printed since its last start."""

    program: str
    work: dict[str, Any]
    folder: Path
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    error: str = ""

    async def run(self, killed: asyncio.Event | None = None) -> None:
        """Run to the end, or kill it at this event. One that hangs is killed, too."""
        log, out = self.folder / "trainer.log", self.folder / "trainer.out"
        process = await start(self.program, self.work, "trainer")
        try:
            async with asyncio.timeout(HUNG_S):
                await (process.wait() if killed is None else killed.wait())
        except TimeoutError:
            self.error = "hung"
        finally:
            await end(process)
        if killed is not None:
            return
        printed = [json.loads(line) for line in out.read_text().splitlines() if line.startswith("{")]
        self.rollouts = [line for line in printed if "ended" not in line]
        ends = [line["ended"] for line in printed if "ended" in line]
        self.notes = ends[-1] if ends else {}
        if not self.error and (process.returncode or not ends):
            lines = log.read_text(errors="replace").splitlines()
            raised = [line for line in lines if re.match(r"[\w.]+: |[\w.]+(Error|Expired)$", line)]
            name, colon, message = (raised or ["it ended without a word"])[-1].partition(":")
            # The module of the exception does not matter.
            self.error = (name.rpartition(".")[2] + colon + message)[:100]


async def outage(case: Case, rules: list[Rule], proxy: FaultProxy, begun: asyncio.Event) -> None:
    """Apply the case's rules: all the time, or for a minute once the step has begun."""
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
    how, world = SYSTEMS[system], World(folder)
    limit_s = (LIMIT_IN_OUTAGES_S if case.outage else LIMIT_S) + how.more_s
    work = {"way": how.way, "fault": case.name, "groups": GROUPS, "group": GROUP, "limit_s": limit_s}
    work |= {"folder": str(folder), "truths": str(world.file), "model": str(BYTE_MODEL)}
    async with serving(how, world, work) as proxy:
        trainer = Trainer(how.program, work, folder)
        began = time.monotonic()
        rules = deepcopy(case.rules_for(system))
        faults = asyncio.create_task(outage(case, rules, proxy, world.begun))
        try:
            if case.kill:
                await trainer.run(killed=world.half)
            await trainer.run()
            if case.restart and trainer.error:
                await faults
                error = f"started again after {trainer.error}"
                await trainer.run()
                trainer.error = error
        finally:
            faults.cancel()
        world.read()
        return {
            **count(world.truths.values(), trainer.rollouts),
            "leaked": world.open_sessions(),
            "hits": sum(rule.hits for rule in rules),
            "ended": trainer.error or "yes",
            "missing": trainer.notes,
            "seconds": round(time.monotonic() - began, 1),
        }


# --- the matrix ------------------------------------------------------------------------------------------------


async def matrix(systems: Iterable[str], cases: Iterable[Case], done: Callable[[dict[str, Any]], None]) -> None:
    free = asyncio.Semaphore(2)  # steps wait most of the time

    async def one(system: str, case: Case) -> None:
        row = {"fault": case.name, "system": system, "date": today()}
        if case.name in SYSTEMS[system].missing:
            done({**row, "not_applicable": SYSTEMS[system].missing[case.name]})
            return
        async with free:
            with tempfile.TemporaryDirectory() as folder:
                done({**row, **await run(system, case, Path(folder))})

    await asyncio.gather(*(one(system, case) for case in cases for system in systems))


# --- the page ------------------------------------------------------------------------------------------------

Results = Mapping[str, Any]
Row = Mapping[str, Any]
WRONG = {"invented": "with an invented reward", "foreign": "with foreign tokens", "duplicated": "doubled"}
OTHERS = {"leaked": "leaked", "again": "run again"}
COUNTS = ("delivered", "lost", *("duplicated", "invented", "foreign"), *OTHERS)


def planned(results: Results) -> int:
    """Return the rollouts of one step."""
    return int(results["settings"]["groups"] * results["settings"]["group"])


def systems_of(results: Results) -> list[str]:
    found = {row["system"] for row in results["rows"]}
    return [system for system in SYSTEMS if system in found]


def totals(results: Results) -> Table:
    """Return one line for each system: the sums over the faults that it can meet."""
    lines = []
    for system in systems_of(results):
        rows = [row for row in _met(results) if row["system"] == system and row["fault"] != "none"]
        sums = [str(sum(row[name] for row in rows)) for name in COUNTS]
        sums[0] += f" of {len(rows) * planned(results)}"
        lines.append([system, str(len(rows)), *sums, str(sum(row["ended"] != "yes" for row in rows))])
    return Table(("system", "faults", *COUNTS, "steps that did not end by themselves"), lines)


def table(results: Results) -> Table:
    """Return one line for each fault."""
    systems, by_place = systems_of(results), {(row["fault"], row["system"]): row for row in results["rows"]}
    lines = [
        [title, *(_cell(by_place.get((name, system), {}), planned(results)) for system in systems)]
        for name, title in results["cases"].items()
        if any((name, system) in by_place for system in systems)
    ]
    return Table(("fault", *systems), lines)


def _met(results: Results) -> list[Row]:
    return [row for row in results["rows"] if "not_applicable" not in row]


def _cell(row: Row, all_of_them: int) -> str:
    if "delivered" not in row:
        return f"n/a: {row['not_applicable']}" if row else ""
    parts = [f"**{row['delivered']}**" if row["delivered"] == all_of_them else f"{row['delivered']}"]
    parts += [f"{row[name]} {text}" for name, text in ({"lost": "lost"} | WRONG | OTHERS).items() if row[name]]
    parts += [f"the step: `{row['ended'].replace('|', '/')}`"] if row["ended"] != "yes" else []
    return ", ".join(parts)


def reasons(results: Results) -> Sequence[str]:
    """Return why each system's rollouts are missing, one line for each fault and system."""
    order = list(results["cases"])
    found = [row for row in _met(results) if row["missing"]]
    found.sort(key=lambda row: (order.index(row["fault"]), [*SYSTEMS].index(row["system"])))
    return [
        f"{results['cases'][row['fault']]}, {row['system']}: "
        + ", ".join(f"{count} `{reason}`" for reason, count in row["missing"].items())
        for row in found
    ]


def kept(file: Path | None, systems: Sequence[str], faults: Sequence[str]) -> tuple[list[dict[str, Any]], float]:
    """Return the rows of a file of results that are not to be measured again, and the seconds until now."""
    if file is None or not file.exists():
        return [], 0.0
    before = json.loads(file.read_text())
    rows = [row for row in before["results"]["rows"] if row["system"] not in systems or row["fault"] not in faults]
    return rows, before["seconds"]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--faults", nargs="*", choices=BY_NAME, default=list(BY_NAME))
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
    options = parser.parse_args()
    try:
        for system in options.systems:
            command(SYSTEMS[system].program)
    except Unmeasured as error:
        sys.exit(f"a rival cannot be installed: {error}\nPass --systems {OURS} to run without the rivals.")
    names = options.faults[:2] if options.smoke else options.faults
    rows, earlier_s = kept(options.json, options.systems, names)
    began = time.monotonic() - earlier_s
    limits = {"limit_s": LIMIT_S, "limit_in_outages_s": LIMIT_IN_OUTAGES_S, "outage_s": OUTAGE_S}
    results = {
        "versions": {name: version for name, how in SYSTEMS.items() if (version := version_of(how.program))},
        "settings": {"groups": GROUPS, "group": GROUP, **limits},
        "cases": {case.name: case.title for case in CASES},
        "rows": rows,
    }

    def done(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        rows.append(row)
        write_section(options.json, "faults", "python benchmarks/faults.py", time.monotonic() - began, results)

    asyncio.run(matrix(options.systems, [BY_NAME[name] for name in names], done))


if __name__ == "__main__":
    main()
