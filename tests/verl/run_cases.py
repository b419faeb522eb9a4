"""Run `python -m verl.trainer.main_ppo` several times in one process: importing verl and starting Ray is slow.

The argument is a JSON file {name: [overrides]}. The output of each case is between two lines with its name.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

for name, overrides in json.loads(Path(sys.argv[1]).read_text()).items():
    print(f"--- {name}", file=sys.stderr, flush=True)
    sys.argv = ["main_ppo", *overrides]
    try:
        runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
        code: object = 0
    except SystemExit as ended:
        code = ended.code
    print(f"--- {name} ended with code {code}", file=sys.stderr, flush=True)
