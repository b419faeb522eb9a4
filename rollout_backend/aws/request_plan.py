"""Decide once, instead of for each call, where each argument of a repeated call goes in its request.

Invariants:

- A plan supports strings in the path and in headers, bytes as the payload, and members of a JSON body. An operation
  with other arguments has no plan.
- A plan renders only arguments that botocore would accept. botocore serializes or refuses all others.
- A plan exists only if it renders the first call as botocore does.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from botocore.model import ListShape, OperationModel, Shape, StructureShape
from botocore.utils import percent_encode

_JSON = ("json", "rest-json")  # JSON protocols
_SAFE, _SAFE_IN_GREEDY = "-._~", "/~"  # characters that botocore does not encode in a path

_Check = Callable[[Any], bool]
Rendered = tuple[str, dict[str, str], bytes]
"""URL, headers that depend on the arguments, and body."""


class RequestPlan:
    """The plan for calls of one operation that differ only in the values of the same arguments."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        """`request` is the first call's request, serialized and prepared by botocore."""
        self._url: str = request["url"]
        self._headers: dict[str, str] = dict(request["headers"])
        self._body: bytes = request["body"]
        self._checks: dict[str, _Check] = {}  # one check per argument
        self._path = ""  # a format string if it contains arguments
        self._around_path = ("", "")
        self._in_path: dict[str, str] = {}  # characters that are not encoded, by argument
        self._in_headers: dict[str, str] = {}  # header name, by argument
        self._in_json: list[str] = []
        self._fixed_json: dict[str, Any] = {}
        self._payload = ""  # the argument that becomes the body

    @classmethod
    def of(
        cls,
        model: OperationModel,
        request: Mapping[str, Any],
        fixed: Mapping[str, Any],
        varying: Mapping[str, Any],
    ) -> RequestPlan | None:
        """Return a plan for calls with other values of `varying`; None if these calls cannot be planned."""
        plan, members = cls(request), _input(model).members
        if not all(plan._place(model, name, members[name]) for name in varying):
            return None
        if plan._in_path:
            base, mark, query = plan._url.partition("?")
            plan._around_path = base.removesuffix(request["url_path"]), mark + query
            plan._path = plan._path_format(model, fixed)
        if plan._in_json:
            members_sent = json.loads(plan._body)
            plan._fixed_json = {name: value for name, value in members_sent.items() if name not in varying}
        planned = plan.render(varying)
        return plan if planned == (request["url"], dict(request["headers"]), request["body"]) else None

    def render(self, varying: Mapping[str, Any]) -> Rendered | None:
        """Return a request; None if botocore has to build or refuse it."""
        if varying.keys() != self._checks.keys():
            return None
        for name, check in self._checks.items():
            if not check(varying[name]):
                return None
        url, headers, body = self._url, dict(self._headers), self._body
        if self._in_path:
            encoded = {name: percent_encode(varying[name], safe) for name, safe in self._in_path.items()}
            url = self._path.format_map(encoded).join(self._around_path)
        for name, header in self._in_headers.items():
            headers[header] = varying[name]
        if self._payload:
            body = varying[self._payload]
        elif self._in_json:
            body = json.dumps({**self._fixed_json, **{name: varying[name] for name in self._in_json}}).encode()
        return url, headers, body

    def _place(self, model: OperationModel, name: str, shape: Shape) -> bool:
        """Record where an argument goes. Return whether it can be planned."""
        location = shape.serialization.get("location")
        payload = _input(model).serialization.get("payload")
        check = _check_of(shape)
        if location == "uri" and shape.type_name == "string":
            greedy = f"{{{shape.serialization.get('name', name)}+}}" in model.http["requestUri"]
            self._in_path[name] = _SAFE_IN_GREEDY if greedy else _SAFE
        elif location == "header" and shape.type_name == "string":
            self._in_headers[name] = shape.serialization.get("name", name)
        elif name == payload and shape.type_name == "blob":
            self._payload, check = name, lambda value: type(value) is bytes
        elif location is None and payload is None and model.service_model.resolved_protocol in _JSON:
            self._in_json.append(name)
        else:
            return False
        if check is not None:
            self._checks[name] = check
        return check is not None

    def _path_format(self, model: OperationModel, fixed: Mapping[str, Any]) -> str:
        """Return the path as a format string of the varying arguments."""
        path: str = model.http["requestUri"]
        for name, shape in _input(model).members.items():
            key = shape.serialization.get("name", name)
            for placeholder, safe in ((f"{{{key}}}", _SAFE), (f"{{{key}+}}", _SAFE_IN_GREEDY)):
                if name in self._in_path:
                    path = path.replace(placeholder, f"{{{name}}}")
                elif placeholder in path:
                    path = path.replace(placeholder, percent_encode(str(fixed.get(name)), safe))
        return path


def _input(model: OperationModel) -> StructureShape:
    assert model.input_shape is not None
    return model.input_shape


def _check_of(shape: Shape) -> _Check | None:
    """Return a function that checks that a value is valid and serializes as itself; None for complex shapes."""
    if "name" in shape.serialization and shape.serialization.get("location") is None:
        return None
    least = shape.metadata.get("min")
    if shape.type_name == "string" and "jsonvalue" not in shape.serialization:
        return lambda value: type(value) is str and len(value) >= (least or 0)
    if shape.type_name == "integer":
        return lambda value: type(value) is int and (least is None or value >= least)
    if isinstance(shape, ListShape) and (item := _check_of(shape.member)) is not None:
        return lambda value: type(value) is list and len(value) >= (least or 0) and all(map(item, value))
    if isinstance(shape, StructureShape) and not (shape.is_document_type or shape.is_tagged_union):
        return functools.partial(
            _is_structure,
            {name: found for name, member in shape.members.items() if (found := _check_of(member)) is not None},
            set(shape.required_members),
        )
    return None


def _is_structure(checks: Mapping[str, _Check], required: set[str], value: Any) -> bool:
    if type(value) is not dict or not required <= value.keys():
        return False
    return all(name in checks and checks[name](member) for name, member in value.items())
