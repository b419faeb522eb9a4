import os
from pathlib import Path

import pytest

from rollout_backend.config import ModelConfig
from rollout_backend.gateway.renderer import RendererBundle, load_renderer
from rollout_backend.local.scripted import BYTE_MODEL


@pytest.fixture(scope="session")
def byte_model() -> ModelConfig:
    return ModelConfig(path=BYTE_MODEL, name="scripted", renderer="chatml", context_length=4096)


@pytest.fixture(scope="session")
def bundle(byte_model) -> RendererBundle:
    return load_renderer(byte_model)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "rollout-backend" / "models" / "SmolLM2-135M-Instruct"
    path = Path(os.environ.get("ROLLOUT_TEST_MODEL", path))
    if not (path / "tokenizer.json").is_file():
        pytest.skip("the small model is not installed")
    return path
