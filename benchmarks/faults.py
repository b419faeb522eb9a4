"""Inflict the same faults on this project and on others, and count what each loses, doubles, invents and leaves open.

    python benchmarks/faults.py

Each system runs one step of 8 groups of 4 rollouts, against S3, SQS and AgentCore by their wire protocols; a proxy
in front of them injects the faults of `fault_cases.py`, and the agents fail as `rivals/harness.py` says. The rivals
are used as in `rivals/`, with their retries on. docs/make_results.py says what the counts mean.
"""

import asyncio
import contextlib
import copy
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from common import Table, Unmeasured, arguments, drawing, write_section
from emulated_aws import ARN
from fault_cases import BY_HTTP, BY_NAME, BY_S3, CASES, LIGHTNING, OURS, OUTAGE_S, SYSTEMS, Case
from faulty_agents import FaultyAgents
from rivals.environments import PACKAGES, command, environment, version_of
from rivals.harness import TOKENS, Truth

from rollout_backend.model.serving.server_process import free_port
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

    def __init__(self) -> None:
        self.truths: dict[int, Truth] = {}
        self.begun, self.half = asyncio.Event(), asyncio.Event()  # the first agent began, half of them have finished

    def note(self, truth: Truth) -> None:
        self.truths[truth.proof] = truth
        self.begun.set()
        if sum(each.finished for each in self.truths.values()) >= GROUPS * GROUP // 2:
            self.half.set()


@contextlib.asynccontextmanager
async def on_aws(case: Case, world: World, log: Path) -> AsyncIterator[tuple[FaultProxy, dict[str, Any]]]:
    """Yield the proxy between the trainer and the services, and more of the trainer's work."""
    cloud = FaultyAgents(case.name, SECRET, world.note)
    async with cloud.serve() as engine, contextlib.aclosing(cloud), FaultProxy(engine) as proxy:
        yield proxy, {"engine": engine, "arn": ARN, "secret": SECRET}


@contextlib.asynccontextmanager
async def on_lightning(case: Case, world: World, log: Path) -> AsyncIterator[tuple[FaultProxy, dict[str, Any]]]:
    """Run agentlightning's runners, which are a process that prints what is true, behind the proxy."""
    port = free_port()

    async def listen(printed: asyncio.StreamReader) -> None:
        async for line in printed:
            if line.startswith(b"{"):
                world.note(Truth(**json.loads(line)))

    async with FaultProxy(f"http://127.0.0.1:{port}") as proxy:
        work = {"way": "run_agents", "groups": GROUPS, "group": GROUP, "url": proxy.url, "fault": case.name}
        runners = await start("lightning", work, log, asyncio.subprocess.PIPE)
        listening = asyncio.create_task(listen(runners.stdout))
        try:
            yield proxy, {"port": port}
        finally:
            listening.cancel()
            await end(runners)


async def start(program: str, work: dict[str, Any], log: Path, stdout: int | BinaryIO) -> asyncio.subprocess.Process:
    argv = [*command(program), json.dumps(work)]
    with log.open("ab") as errors:
        return await asyncio.create_subprocess_exec(*argv, stdout=stdout, stderr=errors, env=environment(program))


async def end(process: asyncio.subprocess.Process) -> None:
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
        with out.open("wb") as written:
            process = await start(self.program, self.work, log, written)
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
            lines = log.read_text(errors="replace").splitlines() or ["it ended without a word"]
            name, colon, message = lines[-1].partition(":")  # the exception, whose module does not matter
            self.error = (name.rpartition(".")[2] + colon + message)[:100]


async def outage(case: Case, system: str, proxy: FaultProxy, begun: asyncio.Event) -> None:
    """Apply the case's rules: all the time, or for a minute once the step has begun."""
    rules = copy.deepcopy([*case.rules.get(system, ())])  # a rule counts its hits
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
    (program, way), world = PROGRAMS[system], World()
    serve = on_lightning if system == LIGHTNING else on_aws
    async with serve(case, world, folder / "agents.log") as (proxy, more):
        limit_s = LIMIT_IN_OUTAGES_S if case.outage else LIMIT_S
        about = {"way": way, "groups": GROUPS, "group": GROUP, "limit_s": limit_s, "folder": str(folder)}
        trainer = Trainer(program, {**about, "url": proxy.url, **more}, folder)
        began = time.monotonic()
        faults = asyncio.create_task(outage(case, system, proxy, world.begun))
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
        truths = world.truths.values()
        return {
            **count(truths, trainer.rollouts),
            "leaked": sum(truth.open for truth in truths),
            "ended": trainer.error or "yes",
            "missing": trainer.notes,
            "seconds": round(time.monotonic() - began, 1),
        }


# --- the matrix ------------------------------------------------------------------------------------------------


async def matrix(systems: Iterable[str], cases: Iterable[Case], done: Callable[[dict[str, Any]], None]) -> None:
    free = asyncio.Semaphore(2)  # steps wait most of the time

    async def one(system: str, case: Case) -> None:
        row = {"fault": case.name, "system": system}
        if system in case.missing:
            done({**row, "not_applicable": case.missing[system]})
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
_BARS = {"delivered": "#1f6feb", "trained wrongly": "#cf222e", "lost": "#57606a", "missing and reported": "#d6dbe1"}


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


def picture(results: Results) -> str:
    """Return an SVG with a bar for each fault and system, as long as the step's rollouts."""
    systems, titles = systems_of(results), results["cases"]
    places = {name: -place for place, name in enumerate(titles)}
    with drawing(1, len(systems), 4.2 + 1.5 * len(systems), 0.5 + len(titles) / 4, sharey=True) as (axes, written):
        for axis, system in zip(axes[0], systems, strict=True):
            for row in _met(results):
                if row["system"] == system:
                    left, wrong = 0, sum(row[name] for name in WRONG)
                    lengths = [row["delivered"], wrong, row["lost"]]
                    lengths.append(max(0, planned(results) - sum(lengths)))
                    for length, colour in zip(lengths, _BARS.values(), strict=True):
                        if length:
                            axis.barh(places[row["fault"]], length, left=left, height=0.6, color=colour)
                        left += length
                    if row["leaked"]:
                        axis.barh(places[row["fault"]] - 0.4, row["leaked"], height=0.2, color="#bf8700")
            axis.set_title(system)
            axis.set_xticks([])
        axes[0, 0].set_yticks([*places.values()], [*titles.values()])
        handles = [axes[0, 0].barh(0, 0, color=colour) for colour in (*_BARS.values(), "#bf8700")]
        names = [*_BARS, "sessions leaked"]
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0)}
        axes[0, 0].figure.legend(handles, names, **place, ncols=len(names), frameon=False)
    return written.getvalue()


def reasons(results: Results) -> Sequence[str]:
    """Return why each system's rollouts are missing, one line for each fault and system."""
    order = list(results["cases"])
    found = [row for row in _met(results) if row["missing"]]
    found.sort(key=lambda row: (order.index(row["fault"]), SYSTEMS.index(row["system"])))
    return [
        f"{results['cases'][row['fault']]}, {row['system']}: "
        + ", ".join(f"{count} `{reason}`" for reason, count in row["missing"].items())
        for row in found
    ]


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
        print(json.dumps(row), flush=True)
        rows.append(row)
        write_section(options.json, "faults", "python benchmarks/faults.py", time.monotonic() - began, results)

    names = options.faults[:2] if options.smoke else options.faults
    asyncio.run(matrix(options.systems, [BY_NAME[name] for name in names], done))


if __name__ == "__main__":
    main()
