"""What all benchmarks share: options, files, processes, tables and pictures."""

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import math
import os
import platform
import ssl
import tempfile
import urllib.error
import urllib.request
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

from agent_wrapper.contract import Segment, Turn
from rollout_backend.errors import RolloutBackendError
from rollout_backend.model.serving.server_process import ServerProcess

HERE = Path(__file__).parent.absolute()
ROOT = HERE.parent
_OF_ALL = "BENCHMARK_FOLDER"  # the environment variable with the folder of a measurement that others follow


def arguments(documentation: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="little work, to see that it runs")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    return parser


# --- files ------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "system": platform.system() + " " + platform.release(),
        "python": platform.python_version(),
    }


def described(machine: dict[str, Any]) -> str:
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}, "
        f"Python {machine['python']}"
    )


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def write(file: Path | None, found: Any) -> None:
    """Write what a benchmark has found until now, if it was given a file. A kill leaves a whole file."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.new")
        new.write_text(json.dumps(found, indent=1) + "\n")
        new.replace(file)


def append(file: Path, line: Any) -> None:
    """Append a line of JSON. It is on the disk when this returns, unless the process is killed before."""
    with file.open("ab", buffering=0) as lines:  # one write, so that no kill comes between two
        lines.write(json.dumps(line).encode() + b"\n")
        os.fsync(lines.fileno())


def lines_of(file: Path) -> list[Any]:
    lines = file.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written


def write_section(file: Path | None, section: str, command: str, seconds: float, results: dict[str, Any]) -> None:
    """Write what an experiment has found, for docs/make_results.py."""
    about = {"section": section, "date": today(), "machine": machine(), "command": command}
    write(file, {**about, "seconds": round(seconds), "results": results})


@contextlib.contextmanager
def kept_folder() -> Iterator[Path]:
    """Yield an empty folder. The block removes it with those of the blocks and programs inside it, when it ends.

    For five minutes ext4 gives no new file the inode of a deleted one, and searches the disk for another instead.
    After thousands of deleted files that costs up to 1 ms of CPU for each new one, which the next measurement would
    pay.
    """
    if outer := os.environ.get(_OF_ALL):
        yield Path(tempfile.mkdtemp(dir=outer))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_OF_ALL] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ[_OF_ALL]


class Unmeasured(Exception):
    """A rival could not be installed, or did not do the work."""


def compare(
    file: Path | None,
    systems: Iterable[str],
    measure: Callable[[str, Any], dict[str, Any] | None],
    works: Iterable[Any] = (None,),
) -> None:
    """Measure systems at works, which are dataclasses, and write a row for each pair, unless `measure` returns None.

    The row of a rival that raises Unmeasured or an error of this package has the reason in `failed`.
    """
    rows: list[dict[str, Any]] = []
    with kept_folder():
        for work, system in itertools.product(works, systems):
            try:
                found = measure(system, work)
            except (Unmeasured, RolloutBackendError) as error:
                if system == "ours":
                    raise
                found = {"failed": str(error)}
            if found is not None:
                rows.append({"system": system, **(asdict(work) if work else {}), **found})
                print(json.dumps(rows[-1]), flush=True)
                write(file, rows)


# --- processes --------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving(
    argv: Sequence[str],
    port: int,
    log: Path,
    core: int,
    *,
    env: dict[str, str] | None = None,
    stdin: bytes = b"",
    scheme: str = "http",
) -> AsyncIterator[int]:
    """Run a server on one core, and yield its process's id once it answers. Raises StartupError."""
    server = ServerProcess(log.stem, argv, log, env, stdin)
    try:
        await server.start()
        os.sched_setaffinity(server.pid, {core})
        await server.wait_healthy(lambda: asyncio.to_thread(answers, f"{scheme}://127.0.0.1:{port}/health"), 60)
        yield server.pid
    finally:
        await server.stop()


@functools.cache
def unverified_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5, context=unverified_tls()).close()
    except urllib.error.HTTPError:
        return True  # the path of a rival's health is another
    except OSError:
        return False
    return True


def stat_of(process: str | int) -> list[str]:
    """Return the fields of a process's `stat` after its name, on Linux. Raises OSError if it has ended."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def cpu_s(process: str | int) -> float:
    return sum(map(int, stat_of(process)[11:13])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(process: str | int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(process: str | int) -> int:
    """Return the most memory that a process has had, on Linux."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def half_sampled(token_ids: Sequence[int]) -> Segment:
    """Return a segment of one turn, which sampled the second half of its tokens."""
    half = len(token_ids) // 2
    return Segment(
        token_ids=array("i", token_ids),
        response_mask=array("B", [0] * half + [1] * half),
        logprobs=array("f", [math.nan] * half + [-0.5] * half),
        turns=(Turn(start=half, end=2 * half, finish_reason="stop", weight_versions=()),),
    )


# --- tables and pictures ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def shown(value: float | str | None) -> str:
    """Return a number with three significant digits, or a text; "" for None."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@contextlib.contextmanager
def drawing(rows: int, columns: int, width: float, height: float, **more: Any) -> Iterator[tuple[Any, StringIO]]:
    """Yield matplotlib's axes, in a grid, and a file that is the SVG when the block has ended.

    Equal values give equal bytes.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    settings = {"svg.fonttype": "none", "svg.hashsalt": "rollouts", "font.size": 9}
    settings |= {"axes.spines.top": False, "axes.spines.right": False, "xtick.bottom": False, "ytick.left": False}
    with mpl.rc_context(settings):
        figure, axes = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, **more)
        written = StringIO()
        yield axes, written
        figure.tight_layout()
        figure.savefig(written, format="svg", metadata={"Date": None}, bbox_inches="tight")
        pyplot.close(figure)
