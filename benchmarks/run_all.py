"""Run all benchmarks, and write their results, a table and a picture: `make bench`.

    python benchmarks/run_all.py --only collection rival_collection

It takes some 20 minutes on two cores, and more at the first time, when it installs the rivals. `results.json`
has all figures, the machine, the date and the command of each part. `docs/make_performance.py` makes a page of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kept_folder import kept_folder
from report import DETAILS, failures, picture, summary

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Part:
    """One benchmark. Its command is relative to the repository's folder, and writes its results with `--json`."""

    name: str
    command_line: str
    smoke: str = ""  # instead of the options, to see that it works

    def command(self, smoke: bool) -> list[str]:
        python, script, *options = self.command_line.split()
        return [f"{python}/bin/python", f"benchmarks/{script}", *(self.smoke.split() if smoke else options)]


PARTS = (
    Part("emulator", ".venv emulator.py --ceiling", smoke="--ceiling"),
    Part("collection", ".venv collection.py", smoke="--rollouts 64"),
    Part("rival_collection", ".venv collection.py --rivals", smoke="--rivals --rollouts 64"),
    Part("gateway", ".venv gateway.py", smoke="--smoke"),
    Part("rival_gateways", ".venv gateway.py --rivals", smoke="--rivals --smoke"),
    Part("rows", ".venv-verl rows.py", smoke="--smoke"),
    Part("wrapper", ".venv wrapper.py", smoke="--smoke"),
    Part("training_step", ".venv-verl training_step.py --steps 3", smoke="--steps 2"),
)


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


def write_section(file: Path, section: str, command: str, seconds: float, results: dict[str, Any]) -> None:
    """Write what an experiment has found, for docs/make_results.py."""
    file.parent.mkdir(parents=True, exist_ok=True)
    about = {"section": section, "date": datetime.now(UTC).date().isoformat(), "machine": machine()}
    found = {**about, "command": command, "seconds": round(seconds), "results": results}
    file.write_text(json.dumps(found, indent=1) + "\n")


def run(part: Part, out: Path, smoke: bool) -> Any:
    """Return a part's results. Raises CalledProcessError; its output goes to this process's."""
    found = out / f"{part.name}.json"
    found.unlink(missing_ok=True)
    command = part.command(smoke)
    print(f"\n$ {' '.join(command)}", flush=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    # The file goes to the end, so that the command that is published is the one to repeat it.
    subprocess.run([str(ROOT / command[0]), *command[1:], "--json", str(found)], cwd=ROOT, env=env, check=True)
    return json.loads(found.read_text())


def main() -> None:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench")
    parser.add_argument("--smoke", action="store_true", help="little work, to see that all parts run")
    args = parser.parse_args()
    out: Path = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "machine": machine()}
    results |= {"commands": {}, "seconds": {}, "parts": {}, "failed": {}}
    with kept_folder():
        for part in PARTS:
            if part.name not in args.only:
                continue
            began = time.monotonic()
            results["commands"][part.name] = " ".join(part.command(args.smoke))
            try:
                results["parts"][part.name] = run(part, out, args.smoke)
            except subprocess.CalledProcessError as error:
                results["failed"][part.name] = f"ended with {error.returncode}"
            results["seconds"][part.name] = round(time.monotonic() - began)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "results.svg").write_text(picture(results))
    for tables in DETAILS.values():
        for table in tables(results):
            print(f"\n{table.text()}")
    print(f"\n{summary(results).text()}")
    for line in failures(results):
        print(f"no figure: {line}")
    print(f"\n{sum(results['seconds'].values())} s; written: {out / 'results.json'} {out / 'results.svg'}")
    sys.exit(bool(results["failed"]))


if __name__ == "__main__":
    main()
