"""The embedded cloud: S3 and SQS (moto) and an AgentCore stand-in on this machine, for as long as a block lasts.

What must always hold: what it starts ends with the block, sessions first, so that an agent's last words still find
S3; and nothing in it ever talks to AWS, whatever credentials the user's own environment holds.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aioboto3
import aiohttp
from aiobotocore.session import AioSession

from rollout_backend.errors import ConfigError, StartupError
from rollout_backend.local.agentcore import ROLE, StandInSettings
from rollout_backend.local.sessions import Limits
from rollout_backend.process import ServerProcess, free_port

IMAGE = "000000000000.dkr.ecr.{region}.amazonaws.com/local/agent:latest"  # the agent, where a runtime is made of it
ARN = "arn:aws:bedrock-agentcore:{region}:000000000000:runtime/local-0123456789"
PRELOAD = sys.platform == "linux"  # elsewhere a process that has used the system's frameworks may not fork
_START_S = 60.0
_LOOPBACK = "127.0.0.1"


class LocalStorage:
    """S3 and SQS, served by moto in a process of its own, with one bucket made.

    moto's weak spots: concurrent overwrites of one key answer 500, a queue slows down with its depth (200 messages
    a second while shallow), and the signatures of presigned requests are not checked.
    """

    def __init__(self, *, run_dir: Path, bucket: str = "rollouts", region: str = "us-east-1") -> None:
        self.bucket = bucket
        self.region = region
        port = free_port(_LOOPBACK)
        self.endpoint_url = f"http://{_LOOPBACK}:{port}"
        self._aws_config = run_dir.absolute() / "aws-config"
        self._process = ServerProcess(
            "moto (local S3 and SQS)",
            [sys.executable, "-m", "moto.server", "-H", _LOOPBACK, "-p", str(port)],
            run_dir / "moto.log",
            {**os.environ, **self.environ},
        )

    @property
    def environ(self) -> dict[str, str]:
        """What keeps an AWS client off AWS: credentials that open nothing, and no profile of the user's."""
        # A profile of the user's would be looked up and may not be there. Where none is set none must be: a session
        # that botocore made earlier does not read the config file again.
        profile = {"AWS_PROFILE": "default"} if "AWS_PROFILE" in os.environ else {}
        return {
            **profile,
            "AWS_ACCESS_KEY_ID": "local",
            "AWS_SECRET_ACCESS_KEY": "local",
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_CONFIG_FILE": str(self._aws_config),
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), _LOOPBACK, "localhost"])),
        }

    async def start(self) -> None:
        """Raises StartupError, with the end of moto's log."""
        self._aws_config.parent.mkdir(parents=True, exist_ok=True)
        self._aws_config.write_text("[default]\n")
        await self._process.start()
        try:
            await self._process.wait_healthy(lambda: _answers(f"{self.endpoint_url}/moto-api/data.json"), _START_S)
            async with self.s3() as s3:
                await s3.create_bucket(Bucket=self.bucket, **_place(self.region))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        await self._process.stop()

    def s3(self) -> Any:
        """An aioboto3 client, to be entered."""
        # Even with keys given, botocore would insist on the user's own AWS_PROFILE.
        unprofiled = AioSession(session_vars={"profile": (None, None, None, None)})
        session: Any = aioboto3.Session(
            aws_access_key_id=self.environ["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.environ["AWS_SECRET_ACCESS_KEY"],
            botocore_session=unprofiled,
        )
        return session.client("s3", region_name=self.region, endpoint_url=self.endpoint_url)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


class LocalRuntime:
    """The AgentCore stand-in for one agent, in a process of its own.

    `agent` is a Python file, run in its folder by `python` (default: this interpreter), or a whole command, run in
    the current folder. With `preload` a file's sessions are forked from an interpreter that has imported its
    libraries, which starts them ten times as fast. `env` is added to this process's environment, less what belongs
    to AWS and to this backend. A runtime of this agent is there, at `arn`; others can be made from `image` and from
    `images`, which name further agents' commands.

    Raises:
        ConfigError: there is no such file, or the command is empty.
    """

    def __init__(
        self,
        agent: Path | str | Sequence[str],
        *,
        run_dir: Path,
        env: Mapping[str, str],
        region: str = "us-east-1",
        python: Path | None = None,
        limits: Limits = Limits(),  # noqa: B008  # frozen
        preload: bool = PRELOAD,
        images: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        command, cwd = _command(agent, python)
        port = free_port(_LOOPBACK)
        self.arn = ARN.format(region=region)
        self.image = IMAGE.format(region=region)
        self.role = ROLE
        self.limits = limits
        self.endpoint_url = f"http://{_LOOPBACK}:{port}"
        self.session_logs = (run_dir / "sessions").absolute()
        own = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "ROLLOUT__"))}
        settings = StandInSettings(
            arn=self.arn,
            command=command,
            images={self.image: command, **{name: tuple(other) for name, other in (images or {}).items()}},
            cwd=cwd,
            env={**own, "PYTHONUNBUFFERED": "1", **env},
            host=_LOOPBACK,
            port=port,
            log_dir=self.session_logs,
            preload=() if preload and isinstance(agent, (str, Path)) else None,
            limits=limits,
        )
        self._process = ServerProcess(
            "the AgentCore stand-in",
            [sys.executable, "-m", "rollout_backend.local.agentcore"],
            run_dir / "agentcore.log",
            stdin=settings.model_dump_json().encode(),
        )

    async def start(self) -> None:
        """Raises StartupError, with the end of the stand-in's log."""
        await self._process.start()
        try:
            await self._process.wait_healthy(lambda: _answers(self._sessions_url), _START_S)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ends every session, then the stand-in itself."""
        await self._process.stop(self.limits.grace_s + 5.0)

    async def sessions(self) -> dict[str, Any]:
        """`sessions`: {id, pid, status, since} of each open one; `ending`: processes being ended; `counters`."""
        if not self._process.running:
            raise StartupError(f"the AgentCore stand-in is not running. {self._process.tail()}")
        async with aiohttp.ClientSession() as http, http.get(self._sessions_url) as response:
            return dict(json.loads(await response.read()))

    @property
    def _sessions_url(self) -> str:
        return f"{self.endpoint_url}/_local/sessions"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


class LocalCloud:
    """Storage and runtime together, for one agent. Logs go to RUN_DIR.

        async with LocalCloud(Path("agent.py"), run_dir=Path("runs/demo")) as cloud:
            config = load_config("config.yaml", base=cloud.settings())

    The clients of this process need `cloud.environ` in their environment. The arguments are those of `LocalStorage`
    and `LocalRuntime`; so are the errors. In code that is not async, `anyio.from_thread.start_blocking_portal`
    enters it: `portal.wrap_async_context_manager(cloud)`.
    """

    def __init__(
        self,
        agent: Path | str | Sequence[str],
        *,
        run_dir: Path,
        bucket: str = "rollouts",
        region: str = "us-east-1",
        python: Path | None = None,
        env: Mapping[str, str] | None = None,
        limits: Limits = Limits(),  # noqa: B008  # frozen
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
        )
        self._stack = AsyncExitStack()

    @property
    def environ(self) -> dict[str, str]:
        """For this process's own AWS clients, which are told their endpoints by the settings."""
        return self.storage.environ

    def settings(self, *, by_image: bool = False) -> dict[str, Any]:
        """The part of a `RolloutConfig` that is known here; `load_config` takes it as `base`. With `by_image` the
        run makes its runtime from the agent's image, as it would on AWS."""
        limits, runtime = self.runtime.limits, self.runtime
        which = {"image": runtime.image, "role": runtime.role} if by_image else {"arn": runtime.arn}
        return {
            "aws": {"region": self.storage.region, "endpoint_url": self.storage.endpoint_url},
            "storage": {"bucket": self.storage.bucket},
            "runtime": {
                "kind": "agentcore",
                **which,
                "endpoint_url": self.runtime.endpoint_url,
                "max_sessions": limits.max_sessions,
                # Below the stand-in's own, which allow a burst on top.
                "invoke_per_s": limits.invoke_per_s * 0.9,
                "stop_per_s": limits.stop_per_s * 0.9,
                # Sessions wait for one another to start: there are two cores where AWS has a fleet.
                "read_timeout_s": limits.startup_timeout_s + 180.0,
            },
        }

    async def sessions(self) -> dict[str, Any]:
        """See `LocalRuntime.sessions`."""
        return await self.runtime.sessions()

    async def start(self) -> None:
        async with AsyncExitStack() as stack:
            starts = [asyncio.create_task(part.start()) for part in (self.storage, self.runtime)]
            for part in (self.storage, self.runtime):  # ended in the opposite order
                stack.push_async_callback(part.stop)
            try:
                await asyncio.gather(*starts)
            finally:
                for task in starts:
                    task.cancel()
                await asyncio.wait(starts)
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        """Sessions first, then the stand-in, then S3 and SQS. Returns once all are gone."""
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def _command(agent: Path | str | Sequence[str], python: Path | None) -> tuple[tuple[str, ...], Path]:
    if not isinstance(agent, (str, Path)):
        if not agent:
            raise ConfigError("the agent's command is empty: name the program that starts it")
        return tuple(agent), Path.cwd()
    script = Path(agent).absolute()
    if not script.is_file() or script.suffix != ".py":
        raise ConfigError(f"there is no agent at {script}: name the Python file that starts its app")
    interpreter = python.absolute() if python else Path(sys.executable)
    if not interpreter.is_file():
        raise ConfigError(f"there is no Python interpreter at {interpreter}")
    return (str(interpreter), str(script)), script.parent


def _place(region: str) -> dict[str, Any]:
    # S3 refuses the name of its first region here, and every other one if it is left out.
    return {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}


async def _answers(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as http, http.get(url, timeout=aiohttp.ClientTimeout(total=2)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
