"""The messages that one side sends to the other: the request in an invoke's payload, the announcement of a written
result, and the order to a verifier's container."""

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Literal, Self
from urllib.parse import quote, unquote_plus

from pydantic import Field
from pydantic_core import from_json

from agent_wrapper.contract.codec import ContractError
from agent_wrapper.contract.keys import MAX_STEP, artifacts_key, failure_marker_key, result_key
from agent_wrapper.contract.objects import Artifact, ContractObject, Identifier, Outcome

PAYLOAD_VARIABLE = "ROLLOUT_PAYLOAD_FILE"
"""Environment variable with the path of an invoke's payload. If it is set, `RolloutApp.run` runs this payload instead
of serving HTTP."""
RESULT_LIMIT_HEADER = "X-Rollout-Max-Result-Bytes"
"""Header of the answer with a trajectory: how large the result may be, in either form."""
REQUEST_FIELD = "_rollout"
"""The field of an invoke's payload that holds the request."""

PUT_HEADERS = {"Content-Type": "application/octet-stream", "If-None-Match": "*"}
"""Headers of a presigned PUT. The signature covers both; the second one refuses a second write."""
ORDER, TESTS = "verifier.json", "tests.tar.gz"
"""Names of the files that a verifier's container receives: the order, and the task's tests."""


def put_headers(body: bytes) -> dict[str, str]:
    """Return the headers of a presigned PUT of `body`. A bucket with Object Lock requires the digest, which may stay
    unsigned."""
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    return {**PUT_HEADERS, "Content-MD5": base64.b64encode(digest).decode()}


class Sampling(ContractObject):
    """The trainer's sampling settings, which apply to every model call. None selects the engine's default. `top_k` -1
    turns it off. `max_tokens` limits one call. Each reply gets its own seed, derived from `seed`."""

    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1, lt=2**31)
    """Number of tokens to sample from; -1 for all."""
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    """Maximum tokens of one reply."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63 - 1024)


class ModelEndpoint(ContractObject):
    """A session's access to the model being trained."""

    base_url: str = Field(repr=False)
    """OpenAI-compatible, ends in /v1. It contains the key with `gateway.key_in_path`. Before
    the agent starts, the wrapper sends the first heartbeat or, without heartbeats, GET BASE_URL/models."""
    api_key: str = Field(repr=False)
    """Key that opens only this session, until its deadline."""
    name: str
    trajectory_url: str
    """URL at which a POST seals the session and returns its Trajectory, as JSON with `Accept: application/json`."""
    heartbeat_url: str | None = None
    """URL for a POST every `RolloutRequest.heartbeat_s`; None if the backend wants no heartbeats."""


class ResultUrls(ContractObject):
    """Presigned URLs. Each accepts one object under one key, once, until it expires, and permits nothing else."""

    result: str = Field(pattern=r"^https?://", repr=False)
    failure_marker: str = Field(pattern=r"^https?://", repr=False)
    """URL for the failure marker: see `failure_marker_key`."""
    artifacts: str = Field(pattern=r"^https?://", repr=False)
    """URL for the agent's files: see `artifacts_key`."""


class ResultTarget(ContractObject):
    """The bucket and queue for the result. Its key follows from the rollout's ids: see `result_key`.

    With `urls`, the container needs no credentials: it writes a result with one PUT to one of them, with
    `PUT_HEADERS`.
    """

    bucket: str
    prefix: str = ""
    queue_url: str | None = None
    """Queue for the announcement. With None, the backend finds results by listing."""
    region: str | None = None
    urls: ResultUrls | None = Field(default=None, repr=False)


class RolloutRequest(ContractObject):
    """The `_rollout` field of an invoke's payload. All other fields belong to the agent."""

    schema_version: Literal[1] = 1
    run_id: Identifier
    step: int = Field(ge=0, le=MAX_STEP)
    task_id: Identifier
    rollout_id: Identifier
    attempt: int = Field(ge=1)
    session_id: str
    endpoint: ModelEndpoint
    sampling: Sampling
    deadline: float
    """Time by which the agent must have returned, in Unix seconds of the backend's clock. A container measures
    `remaining_s` instead, because its own clock may be wrong."""
    remaining_s: float = Field(ge=0)
    """Seconds from the arrival of this request until the agent must have returned."""
    publish_grace_s: float | None = Field(default=None, gt=0)
    """Seconds from then until the result must be in S3. None: the wrapper applies its own limits only."""
    heartbeat_s: float | None = Field(default=None, gt=0)
    """Seconds between two heartbeats; None for no heartbeats."""
    result: ResultTarget

    @property
    def key(self) -> str:
        """Return the result's key."""
        return result_key(self.result.prefix, self.run_id, self.step, self.rollout_id)

    @property
    def artifacts_key(self) -> str:
        """Return the key of this attempt's artifacts."""
        return artifacts_key(self.result.prefix, self.run_id, self.step, self.rollout_id, self.attempt)

    def key_for(self, outcome: Outcome) -> str:
        """Return the key for a rollout with this outcome: the result's, or the failure marker's of this attempt."""
        if outcome is Outcome.INFRA_ERROR:
            return failure_marker_key(self.result.prefix, self.run_id, self.step, self.rollout_id, self.attempt)
        return self.key

    def url_for(self, outcome: Outcome) -> str | None:
        """Return the presigned URL of `key_for`, or None if the request has none."""
        urls = self.result.urls
        if urls is None:
            return None
        return urls.failure_marker if outcome is Outcome.INFRA_ERROR else urls.result


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
        raise ContractError(where, "not a string")
    return value


class VerifierOrder(ContractObject):
    """The training side's order to a verifier's container: what to score, and how."""

    artifacts_url: str = Field(repr=False)
    """URL at which a GET returns the object that `artifacts_key` names."""
    artifacts: tuple[Artifact, ...]
    """The files that the agent's result lists."""
    timeout_s: float = Field(gt=0)
    """Time limit of the tests."""
    env: dict[str, str] = Field(default={}, repr=False)
    """Environment variables of the tests."""
