"""The values of `serving.kind`: the known kinds, and a factory in a package of the user's."""

import pytest

from rollout_backend.errors import ConfigError
from rollout_backend.model.serving.engine import EngineFactory
from rollout_backend.model.serving.engine_fleet import EngineFleet, engine_factory
from rollout_backend.model.serving.local_engine import LocalEngine
from tests.model.serving.conftest import fake_argv


def fake_engine(model, serving, node):
    return fake_argv(node.host, node.port), {}


class FakeEngineFactory(EngineFactory):
    """Makes engines that need no GPU."""

    def __init__(self, config, log_dir):
        self.count = config.serving.servers
        self._config = config
        self._log_dir = log_dir

    def make(self, number):
        name, config = f"engine-{number}", self._config
        return LocalEngine(name, config.model, config.serving, self._log_dir / f"{name}.log", command=fake_engine)


async def test_engines_of_another_package_serve(make_config, tmp_path):
    config = make_config(serving={"kind": f"{__name__}.FakeEngineFactory", "servers": 2})
    async with EngineFleet(config, tmp_path) as fleet:
        assert len(fleet.engine_urls) == 2


def test_an_unknown_kind_is_refused_when_the_settings_are_read(make_config):
    message = (
        r"serving\.kind: kind 'sglang' is none of process, ray, external, tinker, "
        r"or the import path of an EngineFactory"
    )
    with pytest.raises(ConfigError, match=message):
        make_config(serving={"kind": "sglang"})


def test_a_class_that_is_no_factory_is_refused(make_config, tmp_path):
    with pytest.raises(ConfigError, match=r"serving\.kind: .* is not a subclass of EngineFactory"):
        engine_factory(make_config(serving={"kind": "pathlib.Path"}), tmp_path)
