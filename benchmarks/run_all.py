"""Run all benchmarks, and write their results: `make bench`.

    python benchmarks/run_all.py --only collection

It takes some 20 minutes on two cores, and more at the first time, when it installs the rivals. `results.json` has all
figures, the machine, the date and the command of each part. `docs/make_performance.py` makes a page of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import ROOT, arguments, kept_folder, machine, today, write
from report import failures, picture, summary, table

PARTS = {  # the environment of each
    "collection": ".venv",
    "gateway": ".venv",
    "training_step": ".venv-verl",
    "wrapper": ".venv",
    "ceilings": ".venv",
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench")
    args = parser.parse_args()
    out: Path = args.out.absolute()
    results: dict[str, Any] = {"date": today(), "machine": machine(), "parts": {}, "failed": {}}
    results |= {"commands": {}, "seconds": {}}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    with kept_folder():
        for part in args.only:
            began, found = time.monotonic(), out / f"{part}.json"
            found.unlink(missing_ok=True)
            command = [f"{PARTS[part]}/bin/python", f"benchmarks/{part}.py", *(["--smoke"] if args.smoke else [])]
            results["commands"][part] = " ".join(command)
            print(f"\n$ {' '.join(command)}", flush=True)
            # The file goes to the end, so that the command that is published is the one to repeat it.
            done = subprocess.run([*command, "--json", str(found)], cwd=ROOT, env=env, check=False)
            if done.returncode:
                results["failed"][part] = f"ended with {done.returncode}"
            else:
                results["parts"][part] = json.loads(found.read_text())
            results["seconds"][part] = round(time.monotonic() - began)
    write(out / "results.json", results)
    (out / "results.svg").write_text(picture(results))
    for part in results["parts"]:
        print(f"\n{table(results, part).markdown()}")
    print(f"\n{summary(results).markdown()}")
    for line in failures(results):
        print(f"no figure: {line}")
    print(f"\n{sum(results['seconds'].values())} s; written: {out / 'results.json'} {out / 'results.svg'}")
    sys.exit(bool(results["failed"]))


if __name__ == "__main__":
    main()
