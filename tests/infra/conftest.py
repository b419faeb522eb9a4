import functools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

INFRA = Path(__file__).parents[2] / "infra"


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


def load_template(path: Path) -> dict[str, Any]:
    template: dict[str, Any] = yaml.load(path.read_text(), Loader=_Loader)
    return template


TEMPLATE = load_template(INFRA / "template.yaml")


# --- the template, deployed -------------------------------------------------------------------------------

ACCOUNT, REGION = "000000000000", "us-east-1"


class Stack:
    """What a deployment of the template makes: each property with its functions evaluated."""

    def __init__(self, template: dict[str, Any], arns: dict[str, str], **parameters: str) -> None:
        self._template = template
        self._arns = arns  # what refers to resources gets, by logical id
        declared = template["Parameters"]
        assert parameters.keys() <= declared.keys()
        self.parameters = {name: str(given.get("Default", "")) for name, given in declared.items()} | parameters

    def policy(self, resource: str) -> list[dict[str, Any]]:
        """Return the statements of a managed policy, or of a role's only policy."""
        properties = self._properties(resource)
        (document,) = [each["PolicyDocument"] for each in properties.get("Policies", [properties])]
        return self._value(document)["Statement"]

    def property(self, resource: str, name: str) -> Any:
        return self._value(self._properties(resource)[name])

    def _properties(self, name: str) -> dict[str, Any]:
        return self._template["Resources"][name]["Properties"]

    def _value(self, value: Any) -> Any:
        match value:
            case {"Ref": str(name)}:
                pseudo = {
                    "AWS::Partition": "aws",
                    "AWS::Region": REGION,
                    "AWS::AccountId": ACCOUNT,
                    "AWS::StackName": "my-agent",
                }
                return {**pseudo, **self._arns, **self.parameters, "AWS::NoValue": None}[name]
            case {"Fn::GetAtt": str(path)}:
                return self._arns[path.partition(".")[0]]
            case {"Fn::Sub": str(text)}:
                return re.sub(r"\$\{([\w:.]+)\}", lambda found: self._named(found[1]), text)
            case {"Fn::If": [condition, yes, no]}:
                return self._value(yes if self._condition(condition) else no)
            case dict():
                return {key: self._value(inner) for key, inner in value.items()}
            case list():
                return [found for one in value if (found := self._value(one)) is not None]
        return value

    def _named(self, name: str) -> str:
        resource, dot, _ = name.partition(".")
        return self._value({"Fn::GetAtt": name} if dot else {"Ref": resource})

    def _condition(self, name: Any) -> bool:
        def holds(rule: Any) -> bool:
            match rule:
                case {"Fn::Equals": [left, right]}:
                    return bool(self._joined(left) == self._joined(right))
                case {"Fn::Not": [inner]}:
                    return not holds(inner)
                case {"Fn::And": inner}:
                    return all(map(holds, inner))
                case {"Condition": other}:
                    return self._condition(other)
            raise NotImplementedError(rule)

        return holds(self._template["Conditions"][name])

    def _joined(self, value: Any) -> str:
        match value:
            case {"Fn::Join": [separator, inner]}:
                return str(separator).join(self._joined(inner).split(","))
        return str(self._value(value))


@pytest.fixture
def stack() -> Any:
    """`stack(arns, **parameters) -> Stack`: the template, deployed."""
    return functools.partial(Stack, TEMPLATE)
