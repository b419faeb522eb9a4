"""Run an embedded cloud on this machine: S3 and SQS (moto) and an AgentCore emulator, for the duration of a context.

Invariants:

- Everything that it starts ends with the context, sessions first, so that agents can still write results to S3.
- No part of it ever calls AWS, even if the user's environment has credentials.
- Other users of the machine can reach its ports, but requests need its random key (see `local_keys`).
"""

import asyncio
import json
import os
import re
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import aioboto3
import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession

from rollout_backend.base import local_keys
from rollout_backend.base.addresses import host_port
from rollout_backend.errors import CloudLost, ConfigError, StartupError
from rollout_backend.model.serving.server_process import ServerProcess, free_port
from rollout_backend.workbench.local.agentcore_emulator import ROLE, EmulatorSettings
from rollout_backend.workbench.local.control_plane import ControlLimits
from rollout_backend.workbench.local.session_pool import EmulatorLimits

IMAGE = "000000000000.dkr.ecr.{region}.amazonaws.com/local/agent:latest"
ARN = "arn:aws:bedrock-agentcore:{region}:000000000000:runtime/local-0123456789"
# macOS forbids a fork after the process has used system frameworks.
PRELOAD = sys.platform == "linux"
_UNCHANGED_IMPORT = re.compile(r"^from bedrock_agentcore(\.runtime)? import .*\bBedrockAgentCoreApp\b", re.MULTILINE)
_START_S = 240.0


class _Startable:
    """An async context manager that starts on entry and stops on exit."""

    async def start(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()


class LocalStorage(_Startable):
    """S3 and SQS, served by moto in a separate process, with one bucket.

    moto's limits: concurrent overwrites of a key return 500, a queue slows down with its depth (200 messages per
    second while shallow), and signatures are not verified, except that they must name the `access_key`. With
    `any_key`, every key is accepted.
    """

    _health = "moto-api/data.json"

    def __init__(
        self, *, run_dir: Path, bucket: str = "rollouts", region: str = "us-east-1", any_key: bool = False
    ) -> None:
        if find_spec("moto") is None:
            raise ModuleNotFoundError("moto, which serves S3 and SQS on this machine, is not installed", name="moto")
        self.bucket = bucket
        self.region = region
        port = free_port(local_keys.HOST)
        self.endpoint_url = f"http://{host_port(local_keys.HOST, port)}"
        self._any_key = any_key
        self.access_key = "local" if any_key else secrets.token_hex(16)
        self._aws_config = run_dir.absolute() / "aws-config"
        self.process = ServerProcess(
            "moto (local S3 and SQS)",
            [sys.executable, "-m", "rollout_backend.workbench.local.moto_server", local_keys.HOST, str(port)],
            run_dir / "moto.log",
            {**os.environ, **self.environ},
            stdin=b"\n" if any_key else f"{self.access_key}\n".encode(),
        )

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables that keep AWS clients away from AWS: this cloud's key, and no profile of the user."""
        # botocore fails if the user's AWS_PROFILE does not exist in the config file. Without AWS_PROFILE none is set,
        # because a session that botocore created earlier does not read the config file again.
        profile = {"AWS_PROFILE": "default"} if "AWS_PROFILE" in os.environ else {}
        return {
            **profile,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": local_keys.SECRET,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_CONFIG_FILE": str(self._aws_config),
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            **local_keys.proxy_bypass(),
        }

    async def start(self) -> None:
        """Start moto and create the bucket. Raises StartupError with the end of moto's log."""
        self._aws_config.parent.mkdir(parents=True, exist_ok=True)
        self._aws_config.write_text("[default]\n")
        await self.process.start()
        if not self._any_key:
            local_keys.publish_key(self.endpoint_url, self.access_key)
        try:
            await self.process.wait_healthy(lambda: _answers(f"{self.endpoint_url}/{self._health}"), _START_S)
            async with self.s3() as s3:
                # S3 refuses its first region as a LocationConstraint, and requires every other region.
                place = {} if self.region == "us-east-1" else {"LocationConstraint": self.region}
                await s3.create_bucket(Bucket=self.bucket, **({"CreateBucketConfiguration": place} if place else {}))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        local_keys.withdraw_key(self.endpoint_url)
        await self.process.stop()

    def settings(self) -> dict[str, Any]:
        """Return the part of a `RolloutConfig` that describes this storage, for `load_config(top=...)`."""
        return {
            "aws": {"region": self.region, "endpoint_url": self.endpoint_url},
            "storage": {"bucket": self.bucket},
        }

    async def wait_lost(self) -> None:
        """See `LocalCloud.wait_lost`."""
        await _wait_lost(self.process)

    def s3(self) -> Any:
        """Return an aioboto3 client of S3, as an async context manager."""
        return self.client("s3")

    def client(self, service: str) -> Any:
        """Return an aioboto3 client of `s3` or `sqs`, as an async context manager."""
        direct = AioConfig(proxies={})
        return self._session.client(service, region_name=self.region, endpoint_url=self.endpoint_url, config=direct)

    # Each aioboto3 session loads the models of its services.
    @cached_property
    def _session(self) -> Any:
        # Even with explicit keys, botocore would require the user's AWS_PROFILE to exist.
        unprofiled = AioSession(session_vars={"profile": (None, None, None, None)})
        return aioboto3.Session(
            aws_access_key_id=self.environ["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.environ["AWS_SECRET_ACCESS_KEY"],
            botocore_session=unprofiled,
        )


class LocalRuntime(_Startable):
    """The AgentCore emulator, in a separate process.

    `agent` is a Python file, run in its folder by `python` (default: this interpreter), or a command, run in the
    current folder. With `preload`, a file's sessions are forked from an interpreter that has imported its libraries,
    so they start ten times as fast. `env` is added to this process's environment, without the variables of AWS and of
    this backend. A runtime of this agent exists at `arn`; others can be created from `image` and `images`, which maps
    further image names to commands, or from code in S3. If `agent` is None, no runtime exists yet. Calls need the
    `access_key`, unless it is empty.

    Raises:
        ConfigError: the file does not exist, or the command is empty.
    """

    def __init__(
        self,
        agent: Path | str | Sequence[str] | None,
        *,
        run_dir: Path,
        env: Mapping[str, str],
        region: str = "us-east-1",
        python: Path | None = None,
        limits: EmulatorLimits = EmulatorLimits(),  # noqa: B008
        preload: bool = PRELOAD,
        images: Mapping[str, Sequence[str]] | None = None,
        control: ControlLimits = ControlLimits(),  # noqa: B008
        access_key: str = "",
    ) -> None:
        command, cwd = _command(agent, python) if agent is not None else ((), run_dir)
        port = free_port(local_keys.HOST)
        self.arn = ARN.format(region=region)
        self.image = IMAGE.format(region=region)
        self.role = ROLE
        self.limits = limits
        self._access_key = access_key
        secret = secrets.token_hex(16)
        self.endpoint_url = f"http://{host_port(local_keys.HOST, port)}/{secret}"
        self.session_logs = (run_dir / "sessions").absolute()
        own_image = {self.image: command} if command else {}
        own = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "ROLLOUT__"))}
        settings = EmulatorSettings(
            arn=self.arn,
            command=command,
            images={name: tuple(other) for name, other in {**own_image, **(images or {})}.items()},
            cwd=cwd,
            env={**own, "PYTHONUNBUFFERED": "1", **env},
            host=local_keys.HOST,
            port=port,
            path_secret=secret,
            access_key=access_key,
            log_dir=self.session_logs,
            preload=() if preload and isinstance(agent, (str, Path)) else None,
            limits=limits,
            control=control,
        )
        self.process = ServerProcess(
            "the AgentCore emulator",
            [sys.executable, "-m", "rollout_backend.workbench.local.agentcore_emulator"],
            run_dir / "agentcore.log",
            stdin=settings.model_dump_json().encode(),
        )

    async def start(self) -> None:
        """Start the emulator. Raises StartupError with the end of its log."""
        await self.process.start()
        if self._access_key:
            local_keys.publish_key(self.endpoint_url, self._access_key)
        try:
            await self.process.wait_healthy(lambda: _answers(f"{self.endpoint_url}/_local/sessions"), _START_S)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End all sessions, then the emulator."""
        local_keys.withdraw_key(self.endpoint_url)
        await self.process.stop(self.limits.grace_s + 5.0)

    async def sessions(self) -> dict[str, Any]:
        """Return the open `sessions`: {id, pid, url, status, since}, the number of `ending` ones, and `counters`."""
        return dict(await self._get("sessions"))

    async def ends(self) -> Sequence[Mapping[str, Any]]:
        """Return the last sessions that ended without a stop, as {number, id, message, final}."""
        return list(await self._get("ends?after=0"))

    async def _get(self, what: str) -> Any:
        if not self.process.running:
            raise StartupError(f"the AgentCore emulator is not running. {self.process.log_tail()}")
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self.endpoint_url}/_local/{what}", raise_for_status=True) as response,
        ):
            return json.loads(await response.read())

    async def kill(self, session_id: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill a session's process like the out-of-memory killer, or freeze it with SIGSTOP."""
        [pid] = [each["pid"] for each in (await self.sessions())["sessions"] if each["id"] == session_id]
        os.kill(pid, number)


class LocalCloud(_Startable):
    """Storage and runtime for one agent. Logs go to RUN_DIR.

        async with LocalCloud(Path("agent.py"), run_dir=Path("runs/demo")) as cloud:
            config = load_config("config.yaml", base=cloud.settings())

    AWS clients in this process need `cloud.environ` in their environment. Arguments and errors are those of
    `LocalStorage` and `LocalRuntime`. In synchronous code, enter it with `anyio.from_thread.start_blocking_portal`:
    `portal.wrap_async_context_manager(cloud)`.
    """

    def __init__(
        self,
        agent: Path | str | Sequence[str] | None,
        *,
        run_dir: Path,
        bucket: str = "rollouts",
        region: str = "us-east-1",
        python: Path | None = None,
        env: Mapping[str, str] | None = None,
        limits: EmulatorLimits = EmulatorLimits(),  # noqa: B008
        preload: bool = PRELOAD,
    ) -> None:
        self.storage = LocalStorage(run_dir=run_dir, bucket=bucket, region=region)
        self.runtime = LocalRuntime(
            agent,
            run_dir=run_dir,
            env={**(env or {}), **self.storage.environ, "AWS_ENDPOINT_URL": self.storage.endpoint_url},
            region=region,
            python=python,
            limits=limits,
            preload=preload,
            access_key=self.storage.access_key,
        )
        self._stack = AsyncExitStack()

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables for this process's AWS clients, which get their endpoints from the settings."""
        return self.storage.environ

    def settings(self) -> dict[str, Any]:
        """Return the part of a `RolloutConfig` that describes this cloud, for `load_config(base=...)`."""
        limits = self.runtime.limits
        return {
            **self.storage.settings(),
            "runtime": {
                "kind": "agentcore",
                "arn": self.runtime.arn,
                "endpoint_url": self.runtime.endpoint_url,
                "session_logs": str(self.runtime.session_logs),
                "max_sessions": limits.max_sessions,
                # Below the emulator's rates, which allow bursts.
                "invoke_per_s": limits.invoke_per_s * 0.9,
                "stop_per_s": limits.stop_per_s * 0.9,
                # With few cores, only few sessions start concurrently, so the others wait.
                "read_timeout_s": limits.startup_timeout_s + 180.0,
            },
        }

    async def sessions(self) -> dict[str, Any]:
        """See `LocalRuntime.sessions`."""
        return await self.runtime.sessions()

    async def wait_lost(self) -> None:
        """Wait until a part of the cloud ends unexpectedly; pass this as `wait_lost` to `RolloutManager`.

        Raises:
            CloudLost: moto or the AgentCore emulator has ended; includes the end of its log.
        """
        await _wait_lost(self.storage.process, self.runtime.process)

    async def start(self) -> None:
        async with AsyncExitStack() as stack:
            starts = [asyncio.create_task(part.start()) for part in (self.storage, self.runtime)]
            # The stack runs its callbacks in reverse order, so the runtime stops before the storage.
            for part in (self.storage, self.runtime):
                stack.push_async_callback(part.stop)
            try:
                await asyncio.gather(*starts)
            finally:
                for task in starts:
                    task.cancel()
                await asyncio.wait(starts)
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        """End the sessions, then the emulator, then S3 and SQS, and wait for all of them."""
        await self._stack.aclose()


async def _wait_lost(*processes: ServerProcess) -> None:
    """Wait until one of the processes ends, then raise CloudLost."""
    parts = {asyncio.create_task(process.wait()): process for process in processes}
    try:
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in parts:
            task.cancel()
    process = parts[done.pop()]
    raise CloudLost(
        f"{process.name} ended with code {process.returncode}, so this run cannot continue. The local cloud "
        f"ends, and what it stored is lost: start the run again. {process.log_tail()}"
    )


def _command(agent: Path | str | Sequence[str], python: Path | None) -> tuple[tuple[str, ...], Path]:
    if not isinstance(agent, (str, Path)):
        if not agent:
            raise ConfigError("the agent's command is empty: name the program that starts it")
        return tuple(agent), Path.cwd()
    script = Path(agent).absolute()
    if not script.is_file() or script.suffix != ".py":
        raise ConfigError(f"there is no agent at {script}: name the Python file that starts its app")
    if _UNCHANGED_IMPORT.search(source := script.read_text(errors="replace")) and "agent_wrapper" not in source:
        raise ConfigError(
            f"{script} imports BedrockAgentCoreApp from bedrock_agentcore, which runs no rollouts: import it from "
            "agent_wrapper.bedrock_agentcore"
        )
    interpreter = python.absolute() if python else Path(sys.executable)
    if not interpreter.is_file():
        raise ConfigError(f"there is no Python interpreter at {interpreter}")
    return (str(interpreter), str(script)), script.parent


async def _answers(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as http, http.get(url, timeout=aiohttp.ClientTimeout(total=2)) as response:
            # A server that is up answers a request without the key with 403.
            return response.status in (200, 403)
    except (aiohttp.ClientError, TimeoutError):
        return False
