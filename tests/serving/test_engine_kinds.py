"""The values of `serving.kind`: the known kinds, and a factory in a package of the user's."""

import pytest

from rollout_backend.config import ENGINE_KINDS
from rollout_backend.errors import ConfigError
from rollout_backend.serving.engine import EngineFactory
from rollout_backend.serving.registry import engine_factory


class ToyEngineFactory(EngineFactory):
    def __init__(self, config, log_dir):
        self.count = 2

    def make(self, number):
        return f"engine {number}"


@pytest.mark.parametrize("kind", ENGINE_KINDS)
def test_each_known_kind_has_a_factory(make_config, tmp_path, kind):
    urls = ["http://127.0.0.1:9"] if kind == "external" else []
    assert engine_factory(make_config(serving={"kind": kind, "urls": urls}), tmp_path).count == 1


def test_a_factory_of_another_package_is_used(make_config, tmp_path):
    factory = engine_factory(make_config(serving={"kind": f"{__name__}.ToyEngineFactory"}), tmp_path)
    assert (factory.count, factory.make(0)) == (2, "engine 0")


def test_an_unknown_kind_is_refused_when_the_settings_are_read(make_config):
    message = (
        r"serving\.kind: kind 'sglang' is none of process, ray, external, or the import path of an EngineFactory"
    )
    with pytest.raises(ConfigError, match=message):
        make_config(serving={"kind": "sglang"})


def test_a_class_that_is_no_factory_is_refused(make_config, tmp_path):
    with pytest.raises(ConfigError, match=r"serving\.kind: .* is not a subclass of EngineFactory"):
        engine_factory(make_config(serving={"kind": "pathlib.Path"}), tmp_path)
