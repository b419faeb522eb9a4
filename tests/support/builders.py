"""Plain functions with which tests of several folders build their inputs, and wait."""

import asyncio
import contextlib
import importlib.util
import inspect
import json
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from agent_wrapper.contract import ModelEndpoint
from rollout_backend.config import RolloutConfig
from rollout_backend.core.session_key import shard_of, shorten
from rollout_backend.model.serving.server_process import free_port
from rollout_backend.workbench.local.scripted import BYTE_MODEL, Pieces

T = TypeVar("T")


def run_config(**sections: Any) -> RolloutConfig:
    """Return the settings of a run with the byte model, with some sections replaced."""
    base = {
        "model": {"path": BYTE_MODEL, "name": "m", "renderer": "chatml"},
        "storage": {"bucket": "bucket"},
        "runtime": {"kind": "http", "url": "http://127.0.0.1:9"},
    }
    return RolloutConfig.parse({**base, **sections})


def load_module(path: Path) -> ModuleType:
    """Import a file that belongs to no package."""
    spec = importlib.util.spec_from_file_location("_".join(path.with_suffix("").parts[-2:]), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def issue(authority: Any, folder: Path, host: str, **more: Any) -> tuple[Path, Path]:
    """Write a certificate of trustme's authority with its chain, and its key; return their paths."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    issued = authority.issue_cert(host, **more)
    issued.private_key_pem.write_to_path(key)
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    return certificate, key


def refused(outcome: tuple[int, str], *parts: str) -> None:
    """Check that a command, by its exit code and output, was refused with these words before it started anything."""
    code, output = outcome
    assert code == 2, output
    for part in parts:
        assert part in output
    assert "starting" not in output


def skip(seconds: float) -> None:
    """Advance the clock of the running loop, so that timers of this period are due."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


async def skip_to_end(work: Coroutine[Any, Any, T], seconds: float = 20.0) -> T:
    """Return the result of `work`, and advance the clock again and again meanwhile."""
    task = asyncio.create_task(work)
    while not task.done():
        await asyncio.wait([task], timeout=0.01)
        skip(seconds)
    return await task


class Clock:
    """A clock that tests set, in seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def session_of(shard: int, nth: int = 0) -> str:
    """Return the n-th session that belongs to this one of two gateways."""
    return [name for name in (f"session-{i}" for i in range(100)) if shard_of(name, 2) == shard][nth]


def session_id(name: str) -> str:
    """Return an id that AgentCore accepts, which has 33 characters at least."""
    return f"{name}-{'0' * 40}"[:40]


def listens(host: str, port: int) -> bool:
    """Return whether a server accepts connections at this address."""
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def is_running(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    with contextlib.suppress(OSError):  # it ended before or during the read
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def processes_with(text: str) -> dict[int, str]:
    """Return the command lines of live processes with this text in their command line or environment, by pid."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            command = (folder / "cmdline").read_bytes()
            if command and text.encode() in command.replace(b"\0", b" ") + (folder / "environ").read_bytes():
                found[int(folder.name)] = command.decode(errors="replace").replace("\0", " ")
    return found


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def user(content: Any) -> dict[str, Any]:
    return message("user", content)


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return message("assistant", content, **more)


def system(content: Any) -> dict[str, Any]:
    return message("system", content)


def tool_result(call_id: str, content: Any) -> dict[str, Any]:
    return message("tool", content, tool_call_id=call_id)


def function_tool(name: str, description: str | None = None, **properties: Any) -> dict[str, Any]:
    """Return a tool as Chat Completions has it."""
    described = {"description": description} if description else {}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def function_call(name: str, arguments: Any, call_id: str = "c1") -> dict[str, Any]:
    """Return a call as Chat Completions has it; `arguments` is JSON, or an object."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def stream_data(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the data of the events of a stream, without the final [DONE]."""
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def until(condition: Callable[[], object], timeout_s: float = 240.0, what: str = "the condition is true") -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)


class Held:
    """A script whose replies wait until `go` is set, after they have released `asked`; of pieces, the second one."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.go = threading.Event()

    def __call__(self, prompt: str) -> str:
        self.asked.release()
        self.go.wait(600)
        return "at last"

    def pieces(self, first: str, then: str = "x") -> Pieces:
        def parts() -> Iterator[str]:
            yield first
            self.asked.release()
            self.go.wait(600)
            yield then

        return Pieces(parts())


def hang_up(url: str, key: str, body: dict[str, Any], wait: Callable[[], object]) -> None:
    """Send a model call, and disconnect without an answer after `wait`."""
    server, data = urlsplit(url), json.dumps(body).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Content-Length: {len(data)}"]
    with socket.create_connection((server.hostname, server.port)) as client:
        client.sendall("\r\n".join([*lines, f"Authorization: Bearer {key}", "", ""]).encode() + data)
        assert wait()


@asynccontextmanager
async def served(handle: Callable[[Any], Awaitable[Any]], port: int = 0, **runner: Any) -> AsyncIterator[str]:
    """Serve every request with an aiohttp handler; yield the URL. Without a port it is a free one."""
    from aiohttp import web

    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", handle)
    server = web.AppRunner(app, access_log=None, **runner)
    await server.setup()
    port = port or free_port()
    await web.TCPSite(server, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.cleanup()


def all_serve(serving: Any, restarts: int) -> bool:
    """Whether all engines serve, after so many restarts together."""
    engines = serving.engines.snapshot()[1:]
    return all(each.serving for each in engines) and sum(each.restarts for each in engines) == restarts


def kinds(events: Iterable[Any], server: str) -> list[str]:
    """Return what has happened to a server."""
    return [event.kind for event in events if event.server == server]


async def post(url: str, body: object = None) -> int:
    """Send JSON; return the status of the answer."""
    import aiohttp

    async with aiohttp.ClientSession() as http, http.post(url, json=body or {}) as reply:
        return reply.status


async def generate(url: str, key: str = "session", tokens: int = 1, **body: object) -> tuple[int, dict[str, Any]]:
    """Call an engine, or the router, in the session `key`; return the status and the answer of the fake engine."""
    import aiohttp

    sent = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": tokens}, **body}
    headers = {"X-SMG-Routing-Key": key}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/generate", json=sent, headers=headers) as reply:
        return reply.status, await reply.json()


async def eventually(condition: Callable[[], object], timeout_s: float = 240.0) -> None:
    """Wait until the condition, or the awaitable that it returns, is true."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def background(work: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run `work` until the end of the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def complete(endpoint: ModelEndpoint, *messages: Any, retries: int = 0, stream: bool = False) -> str:
    """Call the model as an agent does; return the text of the reply. A string is a user's message."""
    import openai  # takes a second

    asked = [user(one) if isinstance(one, str) else one for one in messages or ("Hello",)]
    async with openai.AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=retries
    ) as client:
        create = client.chat.completions.create
        if stream:
            chunks = await create(model=endpoint.name, messages=asked, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
        return (await create(model=endpoint.name, messages=asked)).choices[0].message.content or ""


async def report(endpoint: ModelEndpoint, operation: str, **fields: Any) -> int:
    """Report on a rollout as agents for SageMaker's job runtime do; return the status of the answer."""
    body = {"TrajectoryId": shorten(endpoint.api_key), **fields}
    return await post(f"{endpoint.base_url}/{operation}", body)
