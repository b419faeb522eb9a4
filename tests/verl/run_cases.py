"""`python -m verl.trainer.main_ppo` several times over, in one process: to import verl and to start Ray takes long.

Its one argument is a file of JSON: {name: [overrides]}. What each of them says stands between two lines of its name.
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
