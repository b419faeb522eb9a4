"""Options before the command's name: version, color, help and completion."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("typer", "", "trainer"),
        ("typer", "relay", "relay"),
        ("inspect_ai", "export run --to inspect", "inspect"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_installs_it(missing, command, extra, tmp_path):
    (tmp_path / "run").mkdir()
    code = f"import sys; sys.modules[{missing!r}] = None; from rollout_backend.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split()], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    name = f"rollout {command.partition(' ')[0]}".strip()
    assert done.stderr == f"error: {name} needs {missing}: pip install 'rollout-backend[{extra}]'\n"
    assert done.returncode == 2


def test_a_missing_module_of_the_user_is_not_explained(tmp_path):
    code = (
        "import rollout_backend.cli as cli, rollout_backend.__main__ as command\n"
        "def main(): import no_such_module\n"
        "cli.main = main; command.main()"
    )
    argv = [sys.executable, "-c", code, "ls"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError: No module named 'no_such_module'" in done.stderr
