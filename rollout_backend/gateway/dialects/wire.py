"""What dialects share: request bodies checked, server-sent events written.

What must always hold: whatever the bytes are, a body is either read or refused with an ApiError of status 400 that
names the field at fault; and whatever was read can be written as JSON again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from rollout_backend.gateway.errors import ApiError

MAX_STOP_STRINGS = 16
_B = TypeVar("_B", bound="Body")


class Body(BaseModel):
    """Base of what is read from a request. Unknown fields are passed over, values are not converted."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


def _is_finite(value: dict[str, Any]) -> dict[str, Any]:
    json.dumps(value, allow_nan=False)  # 1e999 is read as infinity, which no JSON can say
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_is_finite)]


def read_object(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` is; None if it is anything else."""
    try:
        value = from_json(text, allow_inf_nan=False)
        return _is_finite(value) if isinstance(value, dict) else None
    except ValueError:
        return None


def read(model: type[_B], body: bytes) -> _B:
    """Checks a request's body.

    Raises:
        ApiError: status 400; names the field at fault.
    """
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise refused("body", f"is not JSON: {error}") from None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "union_tag_invalid":
            message = f"type {first['ctx']['tag']!r} is not supported here, only {first['ctx']['expected_tags']}"
        if first["type"] == "union_tag_not_found":
            message = "type is missing, or this is no object"
        raise refused(where, message) from None


def refused(where: str, message: str) -> ApiError:
    return ApiError(400, f"{where}: {message}", param=where)


def chat_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None
) -> dict[str, Any]:
    """A tool in the form that `ModelCall` has. What was not given is not there, for templates print all of it."""
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def check_forced(tool_name: str | None, tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Refuses a `tool_choice` that demands a call that no tool of the request can answer."""
    names = [tool["function"]["name"] for tool in tools or ()]
    if not names:
        raise refused("tool_choice", "demands a tool call, yet there are no tools; send some or leave it out")
    if tool_name is not None and tool_name not in names:
        raise refused("tool_choice.name", f"there is no tool {tool_name!r}; name one of {', '.join(names)}")


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """One server-sent event. In ASCII: some clients end a line at U+2028 and its like as well."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
