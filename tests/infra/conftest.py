from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

TEMPLATE = Path(__file__).parents[2] / "infra" / "template.yaml"


class _Loader(yaml.SafeLoader):
    """YAML with CloudFormation's short forms: `!Ref A` is read as {"Ref": "A"}, `!Sub a` as {"Fn::Sub": "a"}."""


def _short_form(loader: _Loader, suffix: str, node: yaml.Node) -> dict[str, Any]:
    match node:
        case yaml.ScalarNode():
            value: Any = loader.construct_scalar(node)
        case yaml.SequenceNode():
            value = loader.construct_sequence(node, deep=True)
        case _:
            value = loader.construct_mapping(node, deep=True)
    return {suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}": value}


_Loader.add_multi_constructor("!", _short_form)


@pytest.fixture(scope="session")
def template_path() -> Path:
    return TEMPLATE


@pytest.fixture(scope="session")
def template() -> dict[str, Any]:
    return yaml.load(TEMPLATE.read_text(), Loader=_Loader)


@pytest.fixture(scope="session")
def relay_stack() -> dict[str, Any]:
    return yaml.load(TEMPLATE.with_name("relay-ecs.yaml").read_text(), Loader=_Loader)
