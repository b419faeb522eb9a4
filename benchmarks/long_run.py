"""Train for hours while trainer, gateway, engine and janitor are killed at random, and see what grows.

    python benchmarks/long_run.py --hours 8 --json runs/results/long_run.json
    python benchmarks/long_run.py --hours 8 --pieces 4   # run this four times
    python benchmarks/long_run.py --steps 100 --save-every 7 --changes

Everything except the model is real, as in `kill_trainer.py`. The model is `small_policy.py`; its engine is a process
that the backend starts and supervises. At the end `row_origins.py` checks each trained row.

- First half: every 20 to 90 s (`--pause`), one of the four gets SIGKILL. The trainer is restarted here, the rest by
  the backend.
- Third quarter: the trainer is spared. Last quarter: the gateway, too. So both live long enough to see them grow.

At the end each planned rollout must have completed, been trained and be in S3 exactly once, and no session, queue or
process may be left.

With `--pieces` each call runs one piece. At its end all processes get SIGKILL, like those of a machine without power,
and the bucket is copied to the disk, from which the next call continues, with the same options. It needs nothing but
the folder of `--work`, at the same path, and may run days later on another machine. Copy the folder after each piece,
because a piece that is killed itself can only be repeated from a copy. The backend compares the times of weight files
in nanoseconds, so use `cp -a` or `tar --format=posix`.

With `--steps` one of the four gets SIGKILL until the steps are done, or the hours are over. A trainer resumes from a
checkpoint of every `--save-every` steps. With `--changes` it may find its newest checkpoint lost, other tasks and
rewards, and a clock that is four minutes off.
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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from common import Table, drawing, lines_of, resident_bytes, shown, stat_of, write_section
from kill_trainer import stored_and_run_again, write_settings
from policy_trainer import Life, Naming, engine_environment, prepare, train
from row_origins import check_folder

from rollout_backend.model.serving.server_process import ServerProcess
from rollout_backend.workbench.local.cloud import LocalCloud, LocalStorage
from rollout_backend.workbench.local.session_pool import EmulatorLimits

AGENT = Path(__file__).parent / "two_turns_agent.py"
KILLED = {  # processes, by a part of their command
    "trainer": b"--trainer",
    "gateway": b"rollout_backend.model.gateway",
    "engine": b"--engine",
    "janitor": b"rollout_backend.run.janitor",
}
POINTS = 120  # of a line in the picture
SAMPLE_S, WARM_UP_S = 10.0, 600.0
LEFT_S = 600  # for the janitors of killed trainers to end
CLOCKS_S = (0, 0, 240, -240)  # AWS refuses calls by a clock that is 300 s off
ANSWER_S = ((1.0, 10.0), (0.05, 0.5))  # of the engine: for hours, and with --steps
CLOCK = """
import os, time
right, ahead_s = time.time, float(os.environ["CLOCK_AHEAD_S"])
time.time = lambda: right() + ahead_s
"""


class Sample(NamedTuple):
    """What was read of one process."""

    at: float  # seconds since the start of the run
    kind: str
    pid: int
    began: int  # in clock ticks, so that a pid that is used again is another process
    mib: float
    descriptors: int


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


@dataclass
class State:
    """What was read in all pieces of a run. Times are seconds of the run: those between pieces do not count."""

    pieces: list[tuple[float, float]] = field(default_factory=list)
    """When each piece began, in unix seconds and in seconds of the run."""
    starts: list[float] = field(default_factory=list)
    """When each trainer began."""
    kills: list[tuple[float, str]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    files: list[tuple[float, int]] = field(default_factory=list)
    """Number of files of the run."""
    failures: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    """What the trainers found changed."""
    run_again: int = 0

    @classmethod
    def read(cls, file: Path) -> "State":
        state = cls(**json.loads(file.read_text()))
        state.samples = [Sample(*each) for each in state.samples]
        return state

    def at(self, wall: float) -> float:
        """Return the seconds of the run at this unix time."""
        return next(before + wall - began for began, before in reversed(self.pieces) if began <= wall)


class LongRun:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._work = options, options.work.absolute()
        self._seconds = 3600 * options.hours
        self._trained, self._file = self._work / "trained.jsonl", self._work / "state.json"
        self._state = state = State.read(self._file) if self._file.exists() else State()
        # Until the piece ends, a state on disk would be older than the trainer's.
        self._file.unlink(missing_ok=True)
        self._nth = len(state.pieces)
        before = self._nth * self._seconds / options.pieces
        state.pieces.append((time.time(), before))
        self._ends = before + self._seconds / options.pieces
        self._is_last = self._nth + 1 >= options.pieces
        self._draw = random.Random(f"{options.seed} {self._nth}")
        began_at = time.time() - before
        until = began_at + self._seconds
        self._life = Life(
            -1, str(self._work), options.steps, until, options.weights, options.save_every, options.tasks
        )
        self._mark = f"LONG_RUN={time.time()}"
        self._trainer: ServerProcess | None = None

    async def run(self) -> dict[str, Any] | None:
        """Run one piece. Return the results of the run; None if pieces are left."""
        bucket, state, left = self._work / "bucket", self._state, list[Sample]()
        if not self._nth:
            prepare(self._work)
        async with LocalCloud(AGENT, run_dir=self._work / "cloud", limits=EmulatorLimits(grace_s=2.0)) as cloud:
            await load_bucket(cloud.storage, bucket)
            model = {"path": str(self._work / "model"), "name": "small", "renderer": "chatml", "context_length": 4096}
            serving = {"kind": "policy_trainer.EngineFactory", "max_restarts": 10_000}
            # On a busy machine a start can take more than a minute.
            more = {"janitor": {"grace_s": 60}, "gateway": {"startup_timeout_s": 300}, "model": model}
            write_settings(self._work, serving, cloud, **more)
            beside = [asyncio.create_task(work) for work in (self._kill(), self._sample())]
            await self._train(cloud.environ)
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            for _ in range(LEFT_S if self._is_last else 0):
                if not (left := processes(self._mark)):
                    break
                await asyncio.sleep(1)
            stored, again = await stored_and_run_again(cloud)
            state.run_again += again
            if not self._is_last:
                await save_bucket(cloud.storage, bucket)
                self._file.write_text(json.dumps(asdict(state)))
                return None
            async with cloud.storage.client("sqs") as sqs:
                queues = len((await sqs.list_queues()).get("QueueUrls", []))
            sessions = len((await cloud.sessions())["sessions"])
        account = self._account() | {"results in S3": stored, "finished and run again": state.run_again}
        return {
            "settings": self._options.given,
            "answer_s": ANSWER_S[self._options.steps is not None],
            "account": account | {"left": {"sessions": sessions, "queues": queues, "processes": len(left)}},
            "origins": check_folder(self._work),
            "changes": Counter(state.changes),
            "pieces": len(state.pieces),
            "growth": [line for kind in KILLED for line in self._growth(kind)],
            "series": self._series(),
            "kills": [[round(at / 3600, 4), kind] for at, kind in state.kills],
        }

    def _now(self) -> float:
        return self._state.at(time.time())

    async def _train(self, environ: Mapping[str, str]) -> None:
        """Run the trainer, and restart it until it has ended by itself or the piece ends."""
        name, _, value = self._mark.partition("=")
        hook = self._work / "clock"
        hook.mkdir(exist_ok=True)
        (hook / "sitecustomize.py").write_text(CLOCK)
        code, state = None, self._state
        while code != 0:
            life, clock_s = self._next_life()
            log = self._work / f"trainer-{life.number}.log"
            path = os.pathsep.join([str(hook), *filter(None, [os.environ.get("PYTHONPATH")])])
            env = {**os.environ, **environ, name: value, "PYTHONPATH": path, "CLOCK_AHEAD_S": str(clock_s)}
            env |= engine_environment(self._work / "sampled.jsonl", ANSWER_S[self._options.steps is not None])
            command = [sys.executable, __file__, "--trainer", json.dumps(asdict(life))]
            trainer = ServerProcess("the trainer", command, log, env)
            state.starts.append(self._now())
            await trainer.start()
            self._trainer = trainer
            ended = asyncio.create_task(trainer.wait())
            await asyncio.wait({ended}, timeout=None if self._is_last else self._ends - self._now())
            if not ended.done():
                while left := processes(self._mark):
                    for each in left:
                        os.kill(each.pid, signal.SIGKILL)
                    await asyncio.sleep(0.1)
                await ended
                return
            code = ended.result()
            if code not in (0, -signal.SIGKILL):
                state.failures.append(f"exit code {code}")
                print(f"the trainer ended with {code}. {trainer.log_tail()}", flush=True)

    def _next_life(self) -> tuple[Life, int]:
        """Return how the next trainer starts, and by how many seconds its clock is ahead."""
        number, clock_s = len(self._state.starts), 0
        life = replace(self._life, number=number)
        if self._options.changes and number:
            draw, noted = self._draw, self._state.changes
            checkpoints = sorted((self._work / "checkpoints").glob("*.safetensors"), key=lambda each: int(each.stem))
            if draw.random() < 0.2 and len(checkpoints) > 1:
                checkpoints[-1].unlink()
                noted.append("the newest checkpoint was lost")
            if draw.random() < 0.2:
                life = replace(life, data=number)
                noted.append("other tasks")
            if draw.random() < 0.2:
                life = replace(life, offset=1 - life.offset)
                noted.append("other rewards")
            if clock_s := draw.choice(CLOCKS_S):
                noted.append("a clock that is 4 minutes off")
        self._life = life
        return life, clock_s

    async def _kill(self) -> None:
        draw = self._draw
        while True:
            await asyncio.sleep(draw.uniform(*self._options.pause))
            part = 0.0 if self._options.steps is not None else self._now() / self._seconds
            spared = 0 if part < 0.5 else 1 if part < 0.75 else 2 if part < 1 else len(KILLED)
            kinds = [*KILLED][spared:]
            if all(line["life"] != self._life.number for line in lines_of(self._trained)):
                if self._options.steps is not None and draw.random() < 0.9:
                    continue  # on a busy machine, a start takes longer than the pauses
                kinds = [kind for kind in kinds if kind in ("trainer", "janitor")]  # a start needs the others
            living = {each.kind: each.pid for each in processes(self._mark) if each.kind in kinds}
            if "trainer" in living and self._trainer is not None and self._trainer.pid is not None:
                living["trainer"] = self._trainer.pid  # not that of its fork
            if living:
                kind = draw.choice(sorted(living))
                os.kill(living[kind], signal.SIGKILL)
                self._state.kills.append((self._now(), kind))
                print(f"{self._now():.0f} s: killed {kind}", flush=True)

    async def _sample(self) -> None:
        while True:
            self._state.samples += processes(self._mark, self._now())
            self._state.files.append((self._now(), sum(len(files) for _, _, files in os.walk(self._work / "runs"))))
            await asyncio.sleep(SAMPLE_S)

    def _account(self) -> dict[str, Any]:
        # A later trainer may have repeated a step.
        steps = {line["step"]: line for line in lines_of(self._trained) if "step" in line}.values()
        ids = Counter(rollout_id for line in steps for rollout_id in line["ids"])
        return {
            "hours": round(self._now() / 3600, 2),
            "steps": len(steps),
            "outcomes": sum((Counter(line["outcomes"]) for line in steps), Counter()),
            "planned once": sum(count == 1 for count in ids.values()),
            **{name: sum(line[name] for line in steps) for name in ("planned", "trained", "resumed", "reattached")},
            "failures": self._state.failures,
        }

    def _growth(self, kind: str) -> list[dict[str, Any]]:
        """Return the growth of the process that ran longest, after its warm-up, and from each to the next."""
        lives: dict[tuple[int, int], list[Sample]] = defaultdict(list)
        for sample in self._state.samples:
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
        seconds = self._seconds if self._options.steps is None else self._now()

        def note(name: str, at: float, value: float) -> None:
            read[name][int(at / seconds * POINTS)].append(value)

        for sample in self._state.samples:
            note(f"{sample.kind}, MiB", sample.at, sample.mib)
            note(f"{sample.kind}, descriptors", sample.at, sample.descriptors)
        for at, count in self._state.files:
            note("files", at, count)
        for line in lines_of(self._trained):
            at = self._state.at(line.get("ready") or line["at"])
            if "ready" in line:
                began = self._state.starts[line["life"]]
                note("restart, s", began, at - began)
                continue
            note("completed", at, line["outcomes"].get("completed", 0))
            if line["latency"] is not None:
                for name, value in zip(("lag, median", "lag, largest"), line["latency"], strict=True):
                    note(name, at, value)
        how = {"completed": sum, "lag, median": statistics.median}
        return {
            name: [round(how.get(name, max)(values[at]), 3) if at in values else None for at in range(POINTS)]
            for name, values in read.items()
        }


async def save_bucket(storage: LocalStorage, folder: Path) -> None:
    """Copy the bucket, which ends with this process, to an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    async with storage.s3() as s3:
        async for page in s3.get_paginator("list_objects_v2").paginate(Bucket=storage.bucket):
            for item in page.get("Contents", ()):
                (folder / item["Key"]).parent.mkdir(parents=True, exist_ok=True)
                stored = await s3.get_object(Bucket=storage.bucket, Key=item["Key"])
                (folder / item["Key"]).write_bytes(await stored["Body"].read())


async def load_bucket(storage: LocalStorage, folder: Path) -> None:
    async with storage.s3() as s3:
        for inside, _, files in os.walk(folder):
            for file in (Path(inside, name) for name in files):
                key = str(file.relative_to(folder))
                await s3.put_object(Bucket=storage.bucket, Key=key, Body=file.read_bytes())


# --- the page ----------------------------------------------------------------------------------------------


def accounts(results: Mapping[str, Any]) -> Table:
    """Return the accounts, one line for each figure."""
    found = results["account"]
    killed = Counter(kind for _, kind in results["kills"])
    lost = found["planned"] - found["outcomes"].get("completed", 0)
    lines = {
        "killed": ", ".join(f"{killed[kind]} x {kind}" for kind in KILLED),
        **_origins(results),
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


def _origins(results: Mapping[str, Any]) -> dict[str, str]:
    """Return what was found of the rows' origins, if these were checked."""
    if (origins := results.get("origins")) is None:
        return {}
    changes = (f"{count} x {what}" for what, count in results["changes"].items())
    return {
        "trainers": f"{origins['lives']}",
        "changes between two trainers": ", ".join(changes) or "none",
        "steps trained, with those that a later trainer repeated": f"{origins['steps trained']:,}",
        "rows, and model calls in them": f"{origins['rows']:,}, {origins['turns']:,}",
        "rows with tokens from before the trainer's start": f"{origins['sampled before a kill']:,}",
        "rows with tokens from before and after it": f"{origins['sampled in two lives']:,}",
        "different weights that were trained": f"{origins['weights trained']:,}",
        "rows that are not from the weights of their step, or wrong in another way": f"{origins['wrong rows']:,}",
    }


def over_time(results: Mapping[str, Any]) -> Table:
    """Return the medians of what was read, in each quarter of the run."""
    size, lines = POINTS // 4, []
    for name, values in results["series"].items():
        quarters = ([value for value in values[at : at + size] if value is not None] for at in range(0, POINTS, size))
        lines.append([name, *(shown(statistics.median(known)) if known else "" for known in quarters)])
    return Table(("median", "first quarter", "second", "third", "last"), lines)


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
    parser.add_argument("--pieces", type=int, default=1, help="parts of the hours, each of which needs a call")
    parser.add_argument("--steps", type=int, help="end after this many steps")
    parser.add_argument("--pause", type=float, nargs=2, default=(20.0, 90.0), help="between kills, in seconds")
    parser.add_argument("--tasks", type=int, default=4, help="tasks per step; two rollouts each")
    parser.add_argument("--save-every", type=int, default=1, help="steps")
    parser.add_argument("--changes", action="store_true", help="between the lives of the trainer")
    parser.add_argument("--weights", choices=get_args(Naming), default="trainer", help="how weights are named")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/results/long_run"))
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--trainer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.given = {
        name: " ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in vars(options).items()
        if name not in ("work", "json") and value != parser.get_default(name)
    }
    if options.trainer:
        asyncio.run(train(Life(**json.loads(options.trainer))))
        return
    if not (options.work / "state.json").exists():
        if options.pieces > 1 and options.work.exists():
            sys.exit(f"{options.work} is of a run that has ended, or of a piece that was killed: delete it to begin")
        shutil.rmtree(options.work, ignore_errors=True)
        options.work.mkdir(parents=True)
    found = asyncio.run(LongRun(options).run())
    if found is None:
        print("the piece has ended: run the next one with the same options")
        return
    print(json.dumps({name: found[name] for name in ("account", "origins", "changes", "growth")}, indent=1))
    if options.json is not None:
        given = [f"--{name.replace('_', '-')} {value}" for name, value in found["settings"].items()]
        command = " ".join(["python benchmarks/long_run.py", *given]).replace(" True", "")
        name = "long_run" if options.steps is None else "lives"
        write_section(options.json, name, command, 3600 * found["account"]["hours"], found)


if __name__ == "__main__":
    main()
