"""Collect for hours while trainer, gateway, engine and janitor are killed at random, and see what grows.

    python benchmarks/long_run.py --hours 8 --json runs/results/long_run.json

Everything except the model is real, as in `kill_trainer.py`. The engine is a process that the backend starts and
supervises; it answers in 2 to 20 s.

- First half: every 20 to 90 s, one of the four gets SIGKILL. The trainer is restarted here, the rest by the backend.
- Third quarter: the trainer is spared. Last quarter: the gateway, too. So both live long enough to see them grow.

At the end each planned rollout must have completed, been trained and be in S3 exactly once, and no session, queue or
process may be left.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common import Table, drawing, resident_bytes, stat_of, write_section
from kill_trainer import AGENT, lines_of, steps_of, stored_and_run_again, train, write_settings

from rollout_backend.model.serving.local_engine import LocalEngine, LocalEngineFactory
from rollout_backend.model.serving.server_process import ServerProcess
from rollout_backend.workbench.local.cloud import LocalCloud
from rollout_backend.workbench.local.scripted import ScriptedEngine
from rollout_backend.workbench.local.session_pool import EmulatorLimits

KILLED = {  # processes, by a part of their command
    "trainer": b"--trainer",
    "gateway": b"rollout_backend.model.gateway",
    "engine": b"--engine",
    "janitor": b"rollout_backend.run.janitor",
}
POINTS = 120  # of a line in the picture
TASKS = 4  # in a step, with two rollouts each
SAMPLE_S, WARM_UP_S = 10.0, 600.0
LEFT_S = 600  # for the janitors of killed trainers to end


class Sample(NamedTuple):
    """What was read of one process."""

    at: float  # seconds since the start of the run
    kind: str
    pid: int
    began: int  # in clock ticks, so that a pid that is used again is another process
    mib: float
    descriptors: int


class EngineFactory(LocalEngineFactory):
    """Makes this script's engine, which the backend starts and supervises like SGLang."""

    def make(self, number: int) -> LocalEngine:
        def command(_: object, __: object, node: Any) -> tuple[list[str], dict[str, str]]:
            return [sys.executable, __file__, "--engine", str(node.port)], {**os.environ}

        config, name = self._config, f"engine-{number}"
        return LocalEngine(name, config.model, config.serving, self._log_dir / f"{name}.log", command=command)


def serve_engine(port: int) -> None:
    def reply(prompt: str) -> str:
        engine.requests.clear()  # kept for tests, and would grow
        draw = random.Random(prompt)
        time.sleep(draw.uniform(2, 20))
        return f"The answer is {draw.randrange(20)}."

    with ScriptedEngine(reply, port=port) as engine:
        signal.sigwait({signal.SIGINT})  # SIGTERM ends it as it ends any process


def processes(mark: str, at: float = 0.0) -> list[Sample]:
    """Read the processes of the backend that have `mark` in their environment, oldest first."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if not folder.name.isdigit() or mark.encode() not in (folder / "environ").read_bytes():
                continue
            command = (folder / "cmdline").read_bytes()
            if kind := next((kind for kind, word in KILLED.items() if word in command), None):
                began, mib = int(stat_of(folder.name)[19]), resident_bytes(folder.name) / 2**20
                found.append(Sample(at, kind, int(folder.name), began, mib, len(os.listdir(folder / "fd"))))
        except OSError:  # it has ended
            continue
    return sorted(found, key=lambda sample: sample.began)


class LongRun:
    def __init__(self, work: Path, hours: float, seed: int) -> None:
        self._work, self._seed, self._seconds = work, seed, 3600 * hours
        self._checkpoint, self._samples = work / "checkpoint.jsonl", list[Sample]()
        self._began = time.time()
        self._mark = f"LONG_RUN={self._began}"
        self._starts: list[float] = []  # of trainers
        self._trainer: ServerProcess | None = None
        self._kills: list[tuple[float, str]] = []
        self._failures: list[str] = []

    async def run(self) -> dict[str, Any]:
        self._checkpoint.touch()
        async with LocalCloud(AGENT, run_dir=self._work / "cloud", limits=EmulatorLimits(grace_s=2.0)) as cloud:
            serving = {"kind": "long_run.EngineFactory", "max_restarts": 10_000}
            settings = write_settings(self._work, serving, cloud, janitor={"grace_s": 60})
            beside = [asyncio.create_task(work) for work in (self._kill(), self._sample())]
            await self._train(settings, cloud.environ)
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            for _ in range(LEFT_S):
                if not (left := processes(self._mark)):
                    break
                await asyncio.sleep(1)
            stored, again = await stored_and_run_again(cloud)
            async with cloud.storage.client("sqs") as sqs:
                queues = len((await sqs.list_queues()).get("QueueUrls", []))
            sessions = len((await cloud.sessions())["sessions"])
        account = self._account() | {"results in S3": stored, "finished and run again": again}
        return {
            "account": account | {"left": {"sessions": sessions, "queues": queues, "processes": len(left)}},
            "growth": [line for kind in KILLED for line in self._growth(kind)],
            "series": self._series(),
            "kills": [[round(at / 3600, 4), kind] for at, kind in self._kills],
        }

    async def _train(self, settings: Path, environ: Mapping[str, str]) -> None:
        """Run the trainer, and restart it until it has ended by itself."""
        name, _, value = self._mark.partition("=")
        until = str(self._began + self._seconds)
        command = [sys.executable, __file__, "--trainer", str(settings), str(self._checkpoint), until]
        code = None
        while code != 0:
            log = self._work / f"trainer-{len(self._starts)}.log"
            trainer = ServerProcess("the trainer", command, log, {**os.environ, **environ, name: value})
            self._starts.append(time.time())
            await trainer.start()
            self._trainer = trainer
            code = await trainer.wait()
            if code not in (0, -signal.SIGKILL):
                self._failures.append(f"exit code {code}")
                print(f"the trainer ended with {code}. {trainer.log_tail()}", flush=True)

    async def _kill(self) -> None:
        draw = random.Random(self._seed)
        while True:
            await asyncio.sleep(draw.uniform(20, 90))
            part = (time.time() - self._began) / self._seconds
            spared = 0 if part < 0.5 else 1 if part < 0.75 else 2 if part < 1 else len(KILLED)
            kinds = [*KILLED][spared:]
            if max((line.get("ready", 0) for line in lines_of(self._checkpoint)), default=0) < self._starts[-1]:
                kinds = [kind for kind in kinds if kind in ("trainer", "janitor")]  # a start needs the others
            living = {each.kind: each.pid for each in processes(self._mark) if each.kind in kinds}
            if "trainer" in living and self._trainer is not None and self._trainer.pid is not None:
                living["trainer"] = self._trainer.pid  # not that of its fork
            if living:
                kind = draw.choice(sorted(living))
                os.kill(living[kind], signal.SIGKILL)
                self._kills.append((time.time() - self._began, kind))
                print(f"{self._kills[-1][0]:.0f} s: killed {kind}", flush=True)

    async def _sample(self) -> None:
        while True:
            self._samples += processes(self._mark, time.time() - self._began)
            await asyncio.sleep(SAMPLE_S)

    def _account(self) -> dict[str, Any]:
        steps = steps_of(self._checkpoint)
        ids = Counter(rollout_id for line in steps for rollout_id in line["ids"])
        return {
            "hours": round((time.time() - self._began) / 3600, 2),
            "steps": len(steps),
            "outcomes": sum((Counter(line["outcomes"]) for line in steps), Counter()),
            "planned once": sum(count == 1 for count in ids.values()),
            **{name: sum(line[name] for line in steps) for name in ("planned", "trained", "resumed", "reattached")},
            "failures": self._failures,
        }

    def _growth(self, kind: str) -> list[dict[str, Any]]:
        """Return the growth of the process that ran longest, after its warm-up, and from each to the next."""
        lives: dict[tuple[int, int], list[Sample]] = defaultdict(list)
        for sample in self._samples:
            if sample.kind == kind:
                lives[sample.pid, sample.began].append(sample)
        longest = max(lives.values(), key=len, default=[])
        warm = [sample for sample in longest if sample.at - longest[0].at >= WARM_UP_S]
        ends = [life[-1] for life in lives.values() if len(life) > 3]
        found = []
        for what, samples in (("one process", warm), ("one process to the next", ends)):
            if len(samples) > 2:
                hours = [sample.at / 3600 for sample in samples]
                line: dict[str, Any] = {"kind": kind, "what": what, "samples": len(samples)}
                line["hours"] = hours[-1] - hours[0]
                for name in ("mib", "descriptors"):
                    values = [getattr(sample, name) for sample in samples]
                    line[name] = statistics.median(values)
                    line[f"{name}_per_h"] = statistics.linear_regression(hours, values).slope
                found.append(line)
        return found

    def _series(self) -> dict[str, list[float | None]]:
        """Return the lines of the picture. A point is the largest value of an interval, or what `how` says."""
        read: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))

        def note(name: str, at: float, value: float) -> None:
            read[name][int(at / self._seconds * POINTS)].append(value)

        for sample in self._samples:
            note(f"{sample.kind}, MiB", sample.at, sample.mib)
            note(f"{sample.kind}, descriptors", sample.at, sample.descriptors)
        for line in lines_of(self._checkpoint):
            if "ready" in line:
                began = max(each for each in self._starts if each < line["ready"])
                note("restart, s", began - self._began, line["ready"] - began)
                continue
            note("completed", line["at"] - self._began, line["outcomes"].get("completed", 0))
            if line["latency"] is not None:
                for name, value in zip(("lag, median", "lag, largest"), line["latency"], strict=True):
                    note(name, line["at"] - self._began, value)
        how = {"completed": sum, "lag, median": statistics.median}
        return {
            name: [round(how.get(name, max)(values[at]), 3) if at in values else None for at in range(POINTS)]
            for name, values in read.items()
        }


# --- the page ----------------------------------------------------------------------------------------------


def accounts(results: Mapping[str, Any]) -> Table:
    """Return the accounts, one line for each figure."""
    found = results["account"]
    killed = Counter(kind for _, kind in results["kills"])
    lost = found["planned"] - found["outcomes"].get("completed", 0)
    lines = {
        "killed": ", ".join(f"{killed[kind]} x {kind}" for kind in KILLED),
        "steps": f"{found['steps']:,}",
        "rollouts planned, each once": f"{found['planned once']:,} of {found['planned']:,}",
        "lost": str(lost),
        "trained": f"{found['trained']:,}",
        "results in S3": f"{found['results in S3']:,}",
        "finished and run again": str(found["finished and run again"]),
        "continued under the next trainer": f"{found['reattached']:,}",
        "finished under an earlier trainer": f"{found['resumed']:,}",
        "trainers that ended by themselves": str(len(found["failures"])),
        "left at the end": ", ".join(f"{count} {what}" for what, count in found["left"].items()),
    }
    return Table(("", "count"), [[*line] for line in lines.items()])


def growth(results: Mapping[str, Any]) -> Table:
    header = ("process", "within", "samples", "hours", "MiB", "MiB an hour", "descriptors", "descriptors an hour")
    lines = [
        [
            *(line["kind"], line["what"], f"{line['samples']:,}", f"{line['hours']:.2f}"),
            *(f"{line['mib']:.1f}", f"{line['mib_per_h']:+.2f}"),
            *(f"{line['descriptors']:.0f}", f"{line['descriptors_per_h']:+.2f}"),
        ]
        for line in results["growth"]
    ]
    return Table(header, lines)


def picture(results: Mapping[str, Any]) -> str:
    """Return an SVG with a panel for memory, descriptors, lag, restarts and rollouts, and a mark for each kill."""
    series, hours = results["series"], results["account"]["hours"]
    panels = {
        "resident memory, MiB": [name for name in series if name.endswith(", MiB")],
        "open descriptors": [name for name in series if name.endswith(", descriptors")],
        "from a result's PUT to the trainer, s": [name for name in series if name.startswith("lag, ")],
        "from a trainer's start to its first step, s": ["restart, s"],
        f"rollouts completed in {60 * hours / POINTS:.1f} minutes": ["completed"],
    }
    with drawing(len(panels), 1, 7.6, 9, sharex=True) as (axes, written):
        for axis, (title, names) in zip(axes[:, 0], panels.items(), strict=True):
            for name in names:
                points = [
                    (hours * (at + 0.5) / POINTS, value) for at, value in enumerate(series[name]) if value is not None
                ]
                axis.plot(*zip(*points, strict=True), label=name.removeprefix("lag, ").partition(",")[0])
            axis.set_title(title, loc="left")
            axis.set_ylim(bottom=0)
            axis.grid(axis="y", alpha=0.4)
            if len(names) > 1:
                axis.legend(frameon=False, bbox_to_anchor=(1, 1), loc="upper left")
        kills = [at for at, _ in results["kills"]]
        axes[-1, 0].plot(kills, [0.0] * len(kills), "|", color="black", clip_on=False)
        axes[-1, 0].set_xlabel(f"hours; a mark for each of {len(kills)} kills")
    return written.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/results/long_run"))
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--trainer", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        serve_engine(options.engine)
        return
    if options.trainer:
        settings, checkpoint, until = options.trainer
        asyncio.run(
            train(Path(settings), Path(checkpoint), TASKS, lambda step: not step or time.time() < float(until))
        )
        return
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    began = time.monotonic()
    found = asyncio.run(LongRun(options.work.absolute(), options.hours, options.seed).run())
    print(json.dumps({"account": found["account"], "growth": found["growth"]}, indent=1))
    if options.json is not None:
        command = f"python benchmarks/long_run.py --hours {options.hours:g} --seed {options.seed}"
        write_section(options.json, "long_run", command, time.monotonic() - began, found)


if __name__ == "__main__":
    main()
