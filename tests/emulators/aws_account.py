"""Serve moto with CloudFormation, repaired where it reads a template otherwise than AWS:
`PYTHON tests/emulators/aws_account.py --host HOST --port PORT`, in the environment of pins/aws.txt."""

import sys
from typing import Any

from moto.cloudformation import models, parsing
from moto.server import main

_generate_resource_name, _clean_json = parsing.generate_resource_name, parsing.clean_json
_parse_condition, _apply = parsing.parse_condition, models.ChangeSet.apply


def generate_resource_name(kind: str, *of: str) -> str:
    """ECR accepts lower case only, and CloudFormation knows it."""
    name = str(_generate_resource_name(kind, *of))
    return name.lower() if kind == "AWS::ECR::Repository" else name


def clean_json(value: Any, resources: Any) -> Any:
    """`AWS::NoValue` in a list removes the item."""
    found = _clean_json(value, resources)
    return [each for each in found if each is not None] if isinstance(found, list) else found


def parse_condition(value: Any, resources: Any, conditions: Any) -> bool:
    """`!Condition` names another condition."""
    if isinstance(value, dict) and "Fn::Condition" in value:
        return bool(conditions[value["Fn::Condition"]])
    return bool(_parse_condition(value, resources, conditions))


def apply(self: Any) -> None:
    """A stack has the outputs of its change set."""
    _apply(self)
    stack, self.stack.template_dict = self.stack, self.template_dict
    stack.output_map = parsing.OutputMap(stack.resource_map, self.template_dict, stack.stack_id)


parsing.generate_resource_name, parsing.clean_json = generate_resource_name, clean_json
parsing.parse_condition, models.ChangeSet.apply = parse_condition, apply

if __name__ == "__main__":
    main(sys.argv[1:])
