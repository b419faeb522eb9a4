"""The run's secret: a file that only its owner can read, or a setting."""

import os
import stat

import pytest

from builders import run_config
from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ConfigError
from rollout_backend.model.serving.run_secret import run_secret, secret_file

SECRET = "a-seal-secret-" * 4


def settings(tmp_path, **gateway) -> RolloutConfig:
    return run_config(run_id="run", gateway=gateway, output_dir=tmp_path)


def test_a_runs_secret_is_created_once_and_only_its_owner_can_read_it(tmp_path):
    first = run_secret(settings(tmp_path))
    assert len(first) >= 48
    assert run_secret(settings(tmp_path)) == first
    assert stat.S_IMODE(secret_file(settings(tmp_path)).stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [".secrets"]
    assert run_secret(settings(tmp_path / "another machine")) != first


def test_a_secret_in_the_settings_is_used_and_hidden(tmp_path):
    config = settings(tmp_path, secret=SECRET)
    assert run_secret(config) == SECRET
    assert not (tmp_path / "run").exists()
    assert SECRET not in repr(config) + config.model_dump_json()
    with pytest.raises(ConfigError, match=r"gateway\.secret"):
        settings(tmp_path, secret="short")


@pytest.mark.parametrize(
    ("text", "mode", "words"), [(SECRET, 0o644, "others may read"), ("short", 0o600, "holds no secret of at least")]
)
def test_an_unusable_secret_file_is_refused(tmp_path, text, mode, words):
    path = secret_file(settings(tmp_path))
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        run_secret(settings(tmp_path))
