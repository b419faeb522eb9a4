"""Invoke and stop sessions with AgentCore's data plane, and classify its errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any, Self
from uuid import uuid4

import aiohttp
from botocore.exceptions import ClientError, ParamValidationError
from pydantic_core import from_json

from agent_wrapper.contract import REQUEST_FIELD
from rollout_backend.agents.runtimes.agentcore.account import (
    account_quotas,
    describe_quotas,
    describe_unknown_quotas,
    needed_permissions,
)
from rollout_backend.agents.runtimes.agentcore.architecture import check_images, check_runtime
from rollout_backend.agents.runtimes.agentcore.control import ENDPOINT, RuntimeMaker, control_client, id_of
from rollout_backend.agents.runtimes.agentcore.images import ImageRuntimes, has_image
from rollout_backend.agents.runtimes.agentcore.provision import RuntimeSpec
from rollout_backend.agents.runtimes.base import AgentRuntime, CleanupSpec, error_of_status
from rollout_backend.agents.runtimes.http import read_answer
from rollout_backend.base import aws
from rollout_backend.base.aws import Permission
from rollout_backend.base.check_result import CheckResult
from rollout_backend.config import AgentCoreConfig
from rollout_backend.core.harbor import CONTAINER_FIELD, TaskContainer
from rollout_backend.core.reasons import NOT_SERVING, NOT_SERVING_TEXT
from rollout_backend.core.session_ends import SessionEnd
from rollout_backend.errors import (
    ContainerStartTimeout,
    InvokeRejected,
    NoCredentials,
    OutcomeUnknown,
    RuntimeCallError,
    RuntimeUnavailable,
    Throttled,
    WrongClock,
)

# "Runtime initialization time exceeded. Please make sure that initialization completes in 120s.": a slow image pull,
# or a host under load. Any other 424 is an error of the container, which a retry does not change.
_START_TIMEOUT = "initialization time exceeded"
# The interval of polling the local emulator for ended sessions.
_POLL_S = 1.0


class AgentCoreRuntime(AgentRuntime):
    """An agent runtime, identified by its ARN."""

    def __init__(
        self,
        config: AgentCoreConfig,
        arn: str,
        data: Any,
        control: Any,
        stack: AsyncExitStack,
        on_status: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._config = config
        self.arn = arn
        self._data = data
        # By the runtime's ARN.
        self._calls: dict[str, tuple[Any, Any]] = {}
        self._images = ImageRuntimes(config, control, on_status) if config.image is not None else None
        self._control = control
        self._stack = stack
        # GetAgentRuntime's response; empty until `check` received one.
        self.described: Mapping[str, Any] = {}

    @classmethod
    async def open(cls, config: AgentCoreConfig, on_status: Callable[[str], object] = lambda text: None) -> Self:
        async with AsyncExitStack() as stack:
            control = await stack.enter_async_context(control_client(config.region, config.endpoint_url))
            arn = config.arn or (await _maker(config, control, on_status).make()).arn
            data = await stack.enter_async_context(
                aws.client(
                    "bedrock-agentcore",
                    region=config.region,
                    endpoint_url=config.endpoint_url,
                    connect_timeout_s=config.connect_timeout_s,
                    read_timeout_s=config.invoke_timeout_s,
                    connections=config.connections,
                )
            )
            return cls(config, arn, data, control, stack.pop_all(), on_status)

    @classmethod
    async def preview(cls, config: AgentCoreConfig) -> str | None:
        if config.image is None:
            return None
        async with control_client(config.region, config.endpoint_url) as control:
            return await _maker(config, control).preview()

    @classmethod
    def permissions(cls, config: AgentCoreConfig) -> Sequence[Permission]:
        return needed_permissions(config)

    @classmethod
    async def check_quotas(cls, limits: AgentCoreConfig, aws_endpoint_url: str | None) -> Sequence[CheckResult]:
        try:
            quotas = await account_quotas(limits.region, aws_endpoint_url)
        except aws.CALL_ERRORS as error:
            denied = "these credentials may not call servicequotas:ListServiceQuotas"
            return [describe_unknown_quotas(limits, denied if aws.is_denied(error) else aws.reason(error))]
        return [describe_quotas(limits, quotas)]

    @classmethod
    async def check_tasks(
        cls, config: AgentCoreConfig, payloads: Mapping[str, Mapping[str, Any]]
    ) -> tuple[Mapping[str, str], Sequence[CheckResult]]:
        if config.image is None:
            return {}, ()
        images, refused = dict[str, str](), dict[str, str]()
        for name, payload in payloads.items():
            if CONTAINER_FIELD in payload:
                try:
                    images[name] = TaskContainer.parse(payload[CONTAINER_FIELD], f"{CONTAINER_FIELD}.").image
                except ValueError as error:
                    refused[name] = str(error)
        if not images or config.capacity_provider is not None:
            return refused, ()
        unfit, found = await check_images(images, config.endpoint_url)
        return {**refused, **unfit}, found

    async def check(self, session_s: float = 0.0) -> Sequence[CheckResult]:
        """Describe the runtime and its endpoint, and try to stop a session. Without permission to describe them, only
        try the stop."""
        runtime_id, endpoint_name = id_of(self.arn), self._config.qualifier
        serving, endpoint = await self._describe(
            f"endpoint {endpoint_name!r} of runtime {self.arn}",
            "runtime.qualifier",
            "get_agent_runtime_endpoint",
            agentRuntimeId=runtime_id,
            endpointName=endpoint_name,
        )
        pinned = {"agentRuntimeVersion": serving["liveVersion"]} if endpoint_name != ENDPOINT and serving else {}
        self.described, found = await self._describe(
            f"runtime {self.arn}", "runtime.arn", "get_agent_runtime", agentRuntimeId=runtime_id, **pinned
        )
        defined = [*_check_definition(self.arn, self.described), *_check_lifetime(self.described, session_s)]
        if self.described:
            defined.append(await check_runtime(RuntimeSpec.read(self.described), self._config.endpoint_url))
        if self._images is not None:
            self._images.session_s = session_s or self._images.session_s
        return [found, endpoint, *defined, *await self._try_stop()]

    async def _try_stop(self) -> list[CheckResult]:
        try:
            # The session does not exist: AgentCore answers 404 if stops are allowed.
            await self.stop(f"preflight-{uuid4()}")
        except RuntimeCallError as error:
            if error.reason == "access_denied":
                text = (
                    f"runtime {self.arn}: these credentials may not call StopRuntimeSession, and so probably not "
                    "InvokeAgentRuntime. Attach the stack's TrainerPolicyArn to the trainer's role"
                )
                return [CheckResult("problem", "runtime", text, "runtime-stop")]
            text = f"a stop was not answered as it should: {error}"
            return [CheckResult("warning", "runtime", text, "runtime-stop", error.reason)]
        return [CheckResult("ok", "runtime", "sessions can be stopped", "runtime-stop")]

    async def _describe(
        self, name: str, setting: str, operation: str, **arguments: str
    ) -> tuple[dict[str, Any], CheckResult]:
        """Return the control plane's response, or an empty one, and the result of the check."""
        try:
            described = dict(await getattr(self._control, operation)(**arguments))
        except aws.EXPLAINED as error:
            if aws.is_denied(error):
                return {}, CheckResult("unchecked", setting, f"{name}: these credentials may not describe it")
            return {}, CheckResult.of_error(setting, aws.preflight_error(error, name, setting))
        if described["status"] in ("READY", "UPDATING"):
            return described, CheckResult("ok", setting, f"{name}: {described['status']}")
        why = described.get("failureReason", "")
        return {}, CheckResult("problem", setting, f"{name} is {described['status']}, not READY. {why}".rstrip())

    @property
    def is_in_public_network(self) -> bool:
        network = self.described.get("networkConfiguration") or {}
        # Emulators run on this machine.
        return network.get("networkMode") == "PUBLIC" and self._config.endpoint_url is None

    def limits(self) -> AgentCoreConfig:
        return self._config

    def describe(self) -> dict[str, str]:
        spec = RuntimeSpec.read(self.described) if self.described else None
        found = {
            "arn": self.arn,
            "qualifier": self._config.qualifier,
            "version": self.described.get("agentRuntimeVersion"),
            "image": spec and spec.image,
            "platform": spec and spec.platform_version,
        }
        return {name: str(value) for name, value in found.items() if value}

    def log_location(self, session_id: str | None) -> str:
        if (folder := self._config.session_logs) is not None:
            return str(folder if session_id is None else folder / f"{session_id}.log")
        arn = None if self._images is None or session_id is None else self._images.arn_of(session_id)
        return f"CloudWatch, /aws/bedrock-agentcore/runtimes/{id_of(arn or self.arn)}-{self._config.qualifier}"

    async def watch_sessions(self, run_id: str, on_end: Callable[[SessionEnd], None]) -> None:
        """Report sessions that ended without a stop. Only the local emulator lists them; AWS has no such call."""
        if self._config.session_logs is None:
            await super().watch_sessions(run_id, on_end)
        after, timeout = 0, aiohttp.ClientTimeout(total=self._config.connect_timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            while True:
                url = f"{self._config.endpoint_url}/_local/ends?after={after}"
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
                    async with http.get(url, raise_for_status=True) as answer:
                        for end in await answer.json():
                            after = end["number"]
                            on_end(SessionEnd(end["id"], "container_lost", end["message"], final=end["final"]))
                await asyncio.sleep(_POLL_S)

    def cleanup_spec(self) -> CleanupSpec:
        module = "rollout_backend.agents.runtimes.agentcore.cleanup"
        return CleanupSpec(
            f"{module}.session_stopper",
            remover=f"{module}.remove_unused" if self._images is not None else None,
            options={
                "arn": self.arn,
                "qualifier": self._config.qualifier,
                "region": self._config.region,
                "endpoint_url": self._config.endpoint_url,
            },
        )

    def hold(self, payload: Mapping[str, Any]) -> AbstractContextManager[object]:
        return super().hold(payload) if self._images is None else self._images.hold(payload)

    async def wait_ready(self, payload: Mapping[str, Any], run_id: str) -> None:
        if self._images is not None and CONTAINER_FIELD in payload:
            await self._images.wait_ready(payload, run_id)

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        if self._images is None or CONTAINER_FIELD.encode() not in payload:
            return await self._invoke(self.arn, session_id, payload)
        try:
            fields = from_json(payload)
            named = CONTAINER_FIELD in fields
            run_id = fields[REQUEST_FIELD]["run_id"] if named else ""
        except (ValueError, LookupError, TypeError) as error:
            raise InvokeRejected(f"the payload requests no rollout: {error}") from error
        if not named:
            return await self._invoke(self.arn, session_id, payload)
        # The session may be open if an earlier invoke was not answered.
        may_be_open = self._images.arn_of(session_id) is not None
        arn = await self._images.open_session(session_id, fields, run_id)
        try:
            return await self._invoke(arn, session_id, payload)
        except RuntimeCallError as error:
            if error.never_opened and not may_be_open:
                self._images.close_session(session_id)
            if error.reason == "runtime_not_found":
                # It was deleted by hand, or by a run that had not seen the lease yet.
                raise self._images.forget(arn) from error
            raise

    async def _invoke(self, arn: str, session_id: str, payload: bytes) -> bytes:
        try:
            reply = await self._calls_of(arn)[0](runtimeSessionId=session_id, payload=payload)
            async with asyncio.timeout(self._config.invoke_timeout_s), reply["response"] as body:
                return await read_answer(body)
        except ClientError as error:
            raise _to_call_error(error) from error
        except aws.NO_CONNECTION as error:
            if aws.was_sent(error):
                raise OutcomeUnknown(f"the invoke was cut off: {error}") from error
            raise RuntimeUnavailable(f"the runtime cannot be reached: {error}", never_opened=True) from error
        except aws.UNSIGNED as error:
            raise NoCredentials(f"the invoke could not be signed: {error}") from error
        except ParamValidationError as error:
            raise InvokeRejected(f"the invoke was not sent: {error}") from error
        except aws.NO_ANSWER as error:
            raise OutcomeUnknown(f"the invoke was cut off: {str(error) or type(error).__name__}") from error

    async def stop(self, session_id: str) -> bool:
        if self._images is None or not has_image(session_id):
            return await self._stop(self.arn, session_id)
        stopped = [await self._stop(arn, session_id) for arn in await self._images.arns_of(session_id)]
        self._images.close_session(session_id)
        return any(stopped)

    def _calls_of(self, arn: str) -> tuple[Any, Any]:
        """Return the prepared calls that invoke and stop sessions of a runtime."""
        if arn not in self._calls:
            place = {"agentRuntimeArn": arn, "qualifier": self._config.qualifier}
            content_types = {"contentType": "application/json", "accept": "application/json"}
            invoke = self._data.repeated("invoke_agent_runtime", **place, **content_types)
            self._calls[arn] = invoke, self._data.repeated("stop_runtime_session", **place)
        return self._calls[arn]

    async def _stop(self, arn: str, session_id: str) -> bool:
        """Return False if AgentCore answers 404: it has done so while the container ran on."""
        try:
            await self._calls_of(arn)[1](runtimeSessionId=session_id, clientToken=str(uuid4()))
        except ClientError as error:
            if aws.status_of(error) == 404:
                return False
            raise _to_call_error(error) from error
        except aws.UNSIGNED as error:
            raise NoCredentials(f"the stop could not be signed: {error}") from error
        except aws.NO_ANSWER as error:
            raise OutcomeUnknown(f"the stop was not answered: {error}") from error
        return True

    async def aclose(self) -> None:
        if self._images is not None:
            await self._images.aclose()
        await self._stack.aclose()


def _maker(
    config: AgentCoreConfig, control: Any, on_status: Callable[[str], object] = lambda text: None
) -> RuntimeMaker:
    """Return what creates or updates the runtime of `runtime.image`."""
    spec, timeout_s = RuntimeSpec.of(config), config.ready_timeout_s
    return RuntimeMaker(spec, control, timeout_s, ecr_url=config.endpoint_url, on_status=on_status)


def _check_definition(arn: str, described: Mapping[str, Any]) -> Iterator[CheckResult]:
    """Yield checks of a runtime's definition that its caller should know about."""
    if not described:
        for name in ("runtime-mmdsv2", "runtime-platform", "runtime-architecture"):
            yield CheckResult("unchecked", "runtime.arn", "the runtime was not described", name)
        return
    required = (described.get("metadataConfiguration") or {}).get("requireMMDSV2")
    remedy = f"AgentCore refuses to invoke it. rollout deploy --adopt {arn} --yes sets this, and keeps the rest"
    if required:
        yield CheckResult("ok", "runtime.arn", "it requires MMDSv2", "runtime-mmdsv2")
    elif required is None:
        text = f"AgentCore does not say whether it requires MMDSv2. If not, {remedy}"
        yield CheckResult("warning", "runtime.arn", text, "runtime-mmdsv2")
    else:
        yield CheckResult("problem", "runtime.arn", f"it does not require MMDSv2, and {remedy}", "runtime-mmdsv2")
    spec = RuntimeSpec.read(described)
    text = f"sessions run on platform {spec.platform_version}"
    if spec.platform_version != "V1":
        text += ": all start from one snapshot (deploy.md, Sessions that start from a snapshot)"
    yield CheckResult("ok", "runtime.platform_version", text, "runtime-platform")
    found = {
        "warmup_path": ("AgentCore warms a container up by POST {}", spec.warmup_path),
        "min_memory_mib": ("a session has at least {} MiB of memory", spec.min_memory_mib),
        "capacity_provider": ("sessions run on the EC2 instances of {}", spec.capacity_provider),
    }
    for setting, (words, value) in found.items():
        if value is not None:
            yield CheckResult("ok", f"runtime.{setting}", words.format(value), f"runtime-{setting.replace('_', '-')}")
    if (protocol := (described.get("protocolConfiguration") or {}).get("serverProtocol", "HTTP")) != "HTTP":
        text = f"it serves {protocol}, and runs call agents by HTTP: deploy the agent with the protocol HTTP"
        yield CheckResult("problem", "runtime.arn", text, "runtime-protocol")


def _check_lifetime(described: Mapping[str, Any], session_s: float) -> list[CheckResult]:
    lifetime_s = described.get("lifecycleConfiguration", {}).get("maxLifetime")
    if lifetime_s is None:
        return []
    if lifetime_s >= session_s:
        text = f"a session may last {lifetime_s:g} s, and takes {session_s:g} s at most"
        return [CheckResult("ok", "timeouts.agent_s", text, "runtime-lifetime")]
    text = (
        f"the runtime ends every session after {lifetime_s:g} s (its maxLifetime), and an agent and its result "
        f"may take {session_s:g} s (timeouts.agent_s + timeouts.publish_grace_s): raise the one or "
        "lower the other"
    )
    return [CheckResult("problem", "timeouts.agent_s", text, "runtime-lifetime")]


def _to_call_error(error: ClientError) -> RuntimeCallError:
    text = aws.reason(error)
    if aws.is_expired(error):
        return InvokeRejected(text, reason="credentials_expired")
    if aws.is_renewable(error):
        return NoCredentials(text)
    if aws.is_wrong_clock(error):
        return WrongClock(text)
    if aws.is_throttled(error):
        return Throttled(text)
    status = aws.status_of(error)
    if status != 424:
        return error_of_status(status, text)
    if _START_TIMEOUT in text.lower():
        return ContainerStartTimeout(text)
    # Only the local emulator knows how a container ended before it served.
    return InvokeRejected(text, reason=NOT_SERVING if NOT_SERVING_TEXT in text else "container_error")
