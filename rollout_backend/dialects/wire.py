"""Parse request bodies and write server-sent events, for all dialects.

Invariants:

- Every body is either parsed, or refused with an ApiError of status 400 that names the invalid field.
- A parsed body can be serialized to JSON again.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import from_json

from agent_wrapper.contract import ContractError
from agent_wrapper.contract.codec import check_json
from rollout_backend.core.api_error import ApiError
from rollout_backend.dialects.fields import refuse_unknown, refused

MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 1000
_MAX_CONTAINERS, _MAX_VALUES = 20_000, 400_000  # limits of a request: on objects and arrays, and on all values
_B = TypeVar("_B", bound="Body")


class Body(BaseModel):
    """Base class for the parts of a request. Values are not converted, and unknown fields are ignored.

    A complete request sets `extra="allow"`, so that `read` can refuse its unknown fields.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


def _is_finite(value: dict[str, Any]) -> dict[str, Any]:
    json.dumps(value, allow_nan=False)  # 1e999 parses as infinity, which JSON cannot represent
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_is_finite)]


def read_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object. Return None if `text` is anything else."""
    try:
        value = from_json(text, allow_inf_nan=False)
        return _is_finite(value) if isinstance(value, dict) else None
    except ValueError:
        return None


def call_arguments(text: str | Mapping[str, Any] | None, where: str) -> str:
    """Return the arguments of a call in the history as JSON. None, "" and null mean no arguments.

    Raises:
        ApiError: status 400 if they are not a JSON object. Most chat templates would render a different call.
    """
    if isinstance(text, Mapping):
        return json.dumps(text, ensure_ascii=False)
    if text is None or text.strip() in ("", "null"):
        return "{}"
    if not is_object(text):
        raise refused(where, "is not a JSON object; send what the model wrote as text, in content")
    return text


def is_object(text: str) -> bool:
    """Return whether `text` is a JSON object. Unlike `read_object`, accepts halves of surrogate pairs as escapes."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)


def _stop_strings(value: object) -> tuple[str, ...] | None:
    strings = [value] if isinstance(value, str) else value
    if strings is None:
        return None
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise ValueError("must be a string or a list of strings")
    if "" in strings:
        raise ValueError("a stop string is empty; leave it out")
    if max(map(len, strings), default=0) > MAX_STOP_CHARS:
        raise ValueError(f"a stop string has more than {MAX_STOP_CHARS} characters; send a shorter one")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"{len(strings)} stop strings, and at most {MAX_STOP_STRINGS} are searched for; send fewer")
    return tuple(strings)


StopStrings = Annotated[tuple[str, ...] | None, BeforeValidator(_stop_strings)]


def check_counts(body: bytes) -> None:
    """Refuse a body with very many values before validation, which would hold the interpreter's lock."""
    try:
        check_json(body, _MAX_CONTAINERS, _MAX_VALUES)
    except ContractError as error:
        raise refused("body", error.reason) from None


def read(model: type[_B], body: bytes, harmless: Collection[str] = ()) -> _B:
    """Parse a request's body. Of the fields unknown to `model`, only those in `harmless` are ignored.

    Raises:
        ApiError: status 400; names the invalid field.
    """
    try:
        check_counts(body)
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise refused("body", f"is not JSON: {error}") from None
    try:
        request = model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "union_tag_invalid":
            message = f"type {first['ctx']['tag']!r} is not supported here, only {first['ctx']['expected_tags']}"
        if first["type"] == "union_tag_not_found":
            message = "type is missing, or this is not an object"
        raise refused(where, message) from None
    refuse_unknown(request.model_extra, harmless)
    return request


def chat_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None
) -> dict[str, Any]:
    """Return a tool in the format of `ModelCall`. Missing fields are omitted, because templates print every field."""
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def check_forced(tool_name: str | None, tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Refuse a `tool_choice` that requires a tool that the request does not offer."""
    names = [tool["function"]["name"] for tool in tools or ()]
    if not names:
        raise refused("tool_choice", "demands a tool call, yet there are no tools; send some or leave it out")
    if tool_name is not None and tool_name not in names:
        raise refused("tool_choice.name", f"there is no tool {tool_name!r}; name one of {', '.join(names)}")


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in the shape of OpenAI's APIs."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return one server-sent event, in ASCII because some clients also end a line at U+2028."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
