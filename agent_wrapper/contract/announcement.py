"""Parse announcements of written results."""

import json
from collections.abc import Mapping
from typing import Self
from urllib.parse import quote, unquote_plus

from pydantic_core import from_json

from agent_wrapper.contract.codec import ContractError
from agent_wrapper.contract.objects import ContractObject


class Announcement(ContractObject):
    """An object named by a message in the format of S3 event notifications."""

    bucket: str
    key: str

    def encode(self) -> str:
        record = {
            "eventSource": "rollout:agent",
            "eventName": "ObjectCreated:Put",
            "s3": {"bucket": {"name": self.bucket}, "object": {"key": quote(self.key)}},
        }
        return json.dumps({"Records": [record]}, separators=(",", ":"))

    @classmethod
    def decode(cls, body: str) -> list[Self]:
        """Return the objects that a message names. The `s3:TestEvent` that S3 sends at set-up names none.

        Raises:
            ContractError: a field is missing or invalid; the error names it.
        """
        try:
            message = from_json(body)
        except ValueError as error:
            raise ContractError("body", f"not JSON: {error}") from None
        if not isinstance(message, dict):
            raise ContractError("body", "not a JSON object")
        if message.get("Event") == "s3:TestEvent":
            return []
        records = message.get("Records")
        if not isinstance(records, list) or not records:
            raise ContractError("Records", "missing, or not a list of at least one record")
        found = []
        for i, record in enumerate(records):
            bucket = _text_at(record, ("s3", "bucket", "name"), f"Records.{i}")
            key = _text_at(record, ("s3", "object", "key"), f"Records.{i}")
            found.append(cls(bucket=bucket, key=unquote_plus(key)))
        return found


def _text_at(value: object, path: tuple[str, ...], where: str) -> str:
    for name in path:
        where = f"{where}.{name}"
        value = value.get(name) if isinstance(value, Mapping) else None
        if value is None:
            raise ContractError(where, "missing")
    if not isinstance(value, str) or not value:
        raise ContractError(where, "not a text")
    return value
