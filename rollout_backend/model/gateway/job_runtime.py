"""Serve SageMaker's job runtime, which agents of its multi-turn RL call with botocore or `sagemaker.train.rft`.

    POST /sample                        a model call, answered as a whole
    POST /sample-with-response-stream   a model call, answered as a stream
    POST /complete-rollout              {"TrajectoryId", "Status": "ready" | "failed"}: no model call follows
    POST /update-reward                 {"TrajectoryId", "Rewards": [...]}: the rewards of a completed rollout

A trajectory's id is the short form of its session's key: see `session_key.shorten`. Model calls send it in a header.
The job's ARN, AWS's signature and bearer tokens are ignored.

Invariants:

- An agent reports on its own session only, and a report never changes: a repetition succeeds, another value is a
  conflict.
- The body of a request without a valid key is not larger than a head may be.
"""

from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollout_backend.core.session_key import SessionClaims, expand
from rollout_backend.model.dialects.base import Dialect
from rollout_backend.model.gateway.access import MAX_HEAD_BYTES, Authenticator
from rollout_backend.model.gateway.session_share import read_body
from rollout_backend.model.gateway.sessions.registry import SessionRegistry
from rollout_backend.model.model_call import ApiError

# Clients of `sagemaker.train.rft` take an error with these words for a repeated report.
_CONFLICT = "Cannot transition trajectory: "


class _CompleteRollout(BaseModel, strict=True):
    trajectory_id: str = Field(alias="TrajectoryId")
    status: Literal["ready", "failed"] = Field(default="ready", alias="Status")


class _UpdateReward(BaseModel, strict=True):
    trajectory_id: str = Field(alias="TrajectoryId")
    rewards: list[float] = Field(alias="Rewards")
    """NaN and infinity are accepted, so that the rollout ends as `bad_reward`."""


class JobRuntime:
    """The dialects of model calls, and the operations that report on a rollout."""

    def __init__(
        self, authenticator: Authenticator, registry: SessionRegistry, body_s: float, dialects: Sequence[Dialect]
    ) -> None:
        """`body_s` limits the time of reading a report."""
        self.dialects = dialects
        self._authenticator = authenticator
        self._registry = registry
        self._body_s = body_s

    def routes(self, prefix: str) -> Iterator[Route]:
        for path, model in (("/complete-rollout", _CompleteRollout), ("/update-reward", _UpdateReward)):
            yield Route(prefix + path, partial(self._report, model=model), methods=["POST"])

    async def _report(self, request: Request, model: type[_CompleteRollout] | type[_UpdateReward]) -> Response:
        request.state.dialect = self.dialects[0]
        body = await read_body(request, MAX_HEAD_BYTES, self._body_s)
        try:
            report = model.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            raise ApiError(400, f"{where}: {first['msg']}") from None
        key = expand(report.trajectory_id)
        claims = self._authenticator.claims(key, key)
        async with self._registry.share(claims).entry():
            if isinstance(report, _CompleteRollout):
                await self._complete(claims, report.status)
            else:
                await self._update_reward(claims, report.rewards)
        return JSONResponse({})

    async def _complete(self, claims: SessionClaims, status: str) -> None:
        known = self._registry.reports.get(claims.session_id)
        if known is None:
            await self._registry.report(claims, status=status)
        elif known["status"] != status:
            raise ApiError(409, f"{_CONFLICT}it was completed with the status {known['status']}")

    async def _update_reward(self, claims: SessionClaims, rewards: list[float]) -> None:
        known = self._registry.reports.get(claims.session_id)
        if known is None:
            self._registry.check_not_revoked(claims.session_id)
            raise ApiError(409, "the rollout is not complete: call CompleteRollout before UpdateReward")
        if "rewards" not in known:
            await self._registry.report(claims, rewards=rewards)
        elif array("d", known["rewards"]).tobytes() != array("d", rewards).tobytes():
            raise ApiError(409, f"{_CONFLICT}it has other rewards")
