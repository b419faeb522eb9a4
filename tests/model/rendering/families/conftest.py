"""Five families whose conversations are tested in full. `test_properties.py` has all families."""

from typing import Any

import pytest

from builders import function_tool
from families import FAMILIES, Family
from rollout_backend.model.rendering.guarded_renderer import RendererBundle


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(name, marks=() if name == "qwen3" else pytest.mark.slow)
        for name in ("qwen3", "gpt-oss", "llama-3", "glm-5", "deepseek-v3")
    ],
)
def family(request: pytest.FixtureRequest) -> Family:
    return next(each for each in FAMILIES if each.name == request.param)


@pytest.fixture(scope="session")
def bundle(family: Family) -> RendererBundle:
    """The family's renderer by name, over its real tokenizer."""
    return family.bundle()


@pytest.fixture(scope="session")
def tools() -> list[dict[str, Any]]:
    return [
        function_tool("add", "Does add.", a={"type": "integer"}, b={"type": "integer"}),
        function_tool("write", "Does write.", text={"type": "string"}, options={"type": "object"}),
    ]
