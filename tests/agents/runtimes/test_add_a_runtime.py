"""The example of docs/add-a-runtime.md, in a package of its own: its tests, and settings that name it."""

import re
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from rollout_backend.agents.runtimes.base import runtime_class
from rollout_backend.config import load_config

PAGE = (Path(__file__).parents[3] / "docs" / "add-a-runtime.md").read_text()
RUNTIME, TESTS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)
[SETTINGS] = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.M | re.S)

_temporary = TemporaryDirectory()  # removed when the interpreter ends
_folder = Path(_temporary.name)
(_folder / "my_package").mkdir()
(_folder / "my_package" / "job_runtime.py").write_text(RUNTIME)
(_folder / "job_runtime_tests.py").write_text(TESTS)
sys.path.append(str(_folder))
TestJobRuntime = import_module("job_runtime_tests").TestJobRuntime


def test_a_run_finds_it_by_its_import_path():
    config = load_config(base=yaml.safe_load(SETTINGS), env={})
    assert runtime_class(config.runtime).__module__ == "my_package.job_runtime"
