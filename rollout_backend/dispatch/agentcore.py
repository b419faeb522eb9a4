"""AWS Bedrock AgentCore Runtime: the two calls of its data plane, and what each of its errors means."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any, Self

from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

from rollout_backend import aws
from rollout_backend.config import AgentCoreConfig
from rollout_backend.dispatch.control import control_client
from rollout_backend.errors import (
    OutcomeUnknown,
    PreflightError,
    QuotaExceeded,
    Rejected,
    RuntimeCallError,
    RuntimeConflict,
    RuntimeUnavailable,
    Throttled,
    Unsigned,
)


class AgentCoreRuntime:
    """One agent runtime, by its ARN. Made with `open`."""

    def __init__(self, config: AgentCoreConfig, arn: str, data: Any, control: Any, stack: AsyncExitStack) -> None:
        self._config = config
        self.arn = arn
        self._data = data
        self._control = control
        self._stack = stack

    @classmethod
    async def open(cls, config: AgentCoreConfig, arn: str | None = None) -> Self:
        """`arn` is that of a runtime made from `config.image`; by default it is the settings' own."""
        arn = arn or config.arn
        assert arn is not None, "a runtime made from an image is made first"
        async with AsyncExitStack() as stack:
            data = await stack.enter_async_context(
                aws.client(
                    "bedrock-agentcore",
                    region=config.region,
                    endpoint_url=config.endpoint_url,
                    connect_timeout_s=config.connect_timeout_s,
                    read_timeout_s=config.read_timeout_s,
                    connections=min(256, config.max_sessions),
                )
            )
            control = await stack.enter_async_context(control_client(config))
            return cls(config, arn, data, control, stack.pop_all())
        raise AssertionError("unreachable")

    async def check(self) -> None:
        name = f"runtime {self.arn}"
        try:
            runtime = await self._control.get_agent_runtime(agentRuntimeId=self.arn.rsplit("/", 1)[1])
        except ClientError as error:
            if aws.code_of(error) == "AccessDeniedException":
                return  # a trainer's role need not read the control plane; the first invoke will tell
            raise aws.preflight_error(error, name, "runtime.arn") from error
        except BotoCoreError as error:
            raise aws.preflight_error(error, name, "runtime.arn") from error
        if runtime["status"] not in ("READY", "UPDATING"):
            why = runtime.get("failureReason", "")
            raise PreflightError(f"{name} is {runtime['status']}, not READY. {why}".rstrip())

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        try:
            reply = await self._data.invoke_agent_runtime(
                agentRuntimeArn=self.arn,
                runtimeSessionId=session_id,
                qualifier=self._config.qualifier,
                contentType="application/json",
                accept="application/json",
                payload=payload,
            )
            async with reply["response"] as body:
                return bytes(await body.read())
        except ClientError as error:
            raise _classed(error) from error
        except aws.NO_CONNECTION as error:
            raise RuntimeUnavailable(f"the runtime cannot be reached: {error}") from error
        except aws.UNSIGNED as error:
            raise Unsigned(f"the invoke could not be signed: {error}") from error
        except ParamValidationError as error:
            raise Rejected(f"the invoke was not sent: {error}") from error
        except (BotoCoreError, OSError) as error:
            raise OutcomeUnknown(f"the invoke was cut off: {error}") from error

    async def stop(self, session_id: str) -> None:
        try:
            await self._data.stop_runtime_session(
                agentRuntimeArn=self.arn, runtimeSessionId=session_id, qualifier=self._config.qualifier
            )
        except ClientError as error:
            if aws.status_of(error) == 404:
                return
            raise _classed(error) from error
        except aws.UNSIGNED as error:
            raise Unsigned(f"the stop could not be signed: {error}") from error
        except (BotoCoreError, OSError) as error:
            raise RuntimeUnavailable(f"the stop did not get through: {error}") from error

    async def aclose(self) -> None:
        await self._stack.aclose()


def _classed(error: ClientError) -> RuntimeCallError:
    text = f"{aws.code_of(error)}: {aws.message_of(error)}"
    if aws.expired(error):
        return Rejected(text, reason="credentials_expired")
    match aws.status_of(error):
        case 429:
            return Throttled(text)
        case 402:
            return QuotaExceeded(text)
        case 409:
            return RuntimeConflict(text)
        case 424:
            return Rejected(text, reason="container_error")
        case 404:
            return Rejected(text, reason="runtime_not_found")
        case 401 | 403:
            return Rejected(text, reason="access_denied")
        case status if status >= 500:
            return RuntimeUnavailable(text)
        case _:
            return Rejected(text)
