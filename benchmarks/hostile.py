"""Measure what a hostile session costs the others of a gateway: `python benchmarks/hostile.py`.

63 sessions make model calls at a fixed rate, as in `gateway.py`, with and without one session that sends or samples
what is expensive. Both take turns, because a machine's speed changes: the hostile client is a process that is stopped
and continued. A call is timed from when it was due. The engine answers the hostile session at 5,000 tokens per second
at most, and at once in most kinds, which no real engine does. A machine that others load so much that calls queue
without a hostile session shows nothing: its rows have the reason instead of figures.

- `p50`, `p99`: the time that the gateway adds to a call beside the hostile session, in multiples of the time without.
"""

import asyncio
import contextlib
import gzip
import hashlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import trustme
from common import HERE, Unmeasured, arguments, compare, cpu_s, kept_folder, serving, unverified_tls
from gateway import MODEL, Conversation, System, tool
from load_generator import Session

from rollout_backend.model.gateway.access import allow_files
from rollout_backend.model.serving.install import find_model
from rollout_backend.model.serving.server_process import free_port

SESSIONS, RATE, LATENCY_S = 63, 60.0, 0.02
ROUNDS, TURNS, WARM_S = 4, 5, 3.0
MAX_ALONE_S = 0.1
CHAT, COUNT, TRAJECTORY = "/v1/chat/completions", "/v1/messages/count_tokens", "/v1/rollout/trajectory"
WORDS = "some words, and more of them. "


@dataclass(frozen=True)
class Kind:
    """What a hostile session does. `call` is the body of its requests, and `reply` what the engine answers."""

    name: str


@dataclass(frozen=True)
class Attack:
    body: bytes = b""
    path: str = CHAT
    reply: str = "ok"
    connections: int = 16
    headers: str = ""
    reads: bool = True
    method: str = "POST"
    keyless: bool = False
    sends: bool = True
    tls: bool = False
    again_s: float = 0.05  # before a connection that was closed is opened again
    pause_s: float = 0.0  # between the bytes of a body
    first: int = 0  # calls before those of `path`


def call(content: str = "go on", **more: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}], **more}).encode()


def schema(properties: int) -> dict[str, Any]:
    fields = {f"property_{i}": {"type": "object", "properties": {"a": {"type": "string"}}} for i in range(properties)}
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": fields}}}


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}}
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": inner}}


def matching(pattern: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "string", "pattern": pattern}}}


def unique_words(number: int) -> str:
    """Return words that no tokenizer has met before."""
    return " ".join(hashlib.sha256(f"{i}".encode()).hexdigest()[:8] for i in range(number))


BROKEN = '<tool_call>\n{"name": "bash", "arguments": {"command": "'
TOOLS = {"tools": [tool("bash")]}
NUMBER = '<tool_call>\n{"name": "bash", "arguments": {"command": [' + ",".join(["9" * 309] * 40) + "]}}\n</tool_call>"
ATTACKS: dict[str, Callable[[], Attack]] = {
    "malformed calls in replies": lambda: Attack(call(**TOOLS), reply=BROKEN * 1500),
    "malformed calls in streamed replies": lambda: Attack(call(stream=True, **TOOLS), reply=BROKEN * 1500),
    "logprobs of long replies": lambda: Attack(call(logprobs=True), reply=WORDS * 3000),
    "numbers of 309 digits": lambda: Attack(call(**TOOLS), reply=NUMBER),
    "n=16 after thousands of segments": lambda: Attack(call(n=16, seed=1), first=1000),
    "count_tokens": lambda: Attack(call(WORDS * 8000), COUNT),
    "unread streams": lambda: Attack(call(stream=True, n=4), reply=WORDS * 3000, reads=False, connections=64),
    "6,000 tools": lambda: Attack(call(tools=[tool(f"tool_{i}") for i in range(6000)])),
    "many small calls": lambda: Attack(call(), connections=64),
    "schemas": lambda: Attack(call(response_format=schema(2000))),
    "arrays": lambda: Attack(call(metadata={"a": [[]] * 19_000, "b": [0] * 300_000})),
    "gzip bombs": lambda: Attack(gzip.compress(b" " * 2**26), headers="Content-Encoding: gzip\r\n"),
    "slow bodies": lambda: Attack(call(WORDS * 2000), connections=256, pause_s=1.0),
    "trajectory as JSON": lambda: Attack(
        b"", TRAJECTORY, WORDS * 3000, headers="Accept: application/json\r\n", first=20
    ),
    "invalid calls": lambda: Attack(b'{"model": 1}', connections=64),
    "unknown paths": lambda: Attack(path="/v1/nothing", connections=64),
    "heartbeats": lambda: Attack(path="/v1/rollout/heartbeat", connections=64),
    "probes": lambda: Attack(path="/health", connections=64, method="GET", again_s=0.0),
    "probes of a call's path": lambda: Attack(connections=64, method="OPTIONS", again_s=0.0),
    "invalid keys": lambda: Attack(connections=64, keyless=True),
    "1,200 refused requests": lambda: Attack(path="/v1/nothing", connections=1200),
    "1,200 refused keys": lambda: Attack(connections=1200, keyless=True),
    "heads with thousands of fields": lambda: Attack(call(), connections=64, headers="a: b\r\n" * 8000),
    "connections without a request": lambda: Attack(sends=False, connections=64, again_s=0.02),
    "TLS handshakes": lambda: Attack(sends=False, tls=True, connections=64, again_s=0.02),
    "a long text that is rewritten": lambda: Attack(call(WORDS * 5000)),
    "one word of 500 KB": lambda: Attack(call("a" * 500_000)),
    "unique words": lambda: Attack(call(unique_words(55_000))),
    "text without spaces": lambda: Attack(call("".join(map(chr, range(0x4E00, 0x9FA5))) * 8)),
    "a deep schema": lambda: Attack(call(response_format=nested(300))),
    "a pattern of many repetitions": lambda: Attack(call(response_format=matching("^(.{0,300}x){0,300}$"))),
}


# --- the hostile session, in its own process ------------------------------------------------------------------


def attack(kind: str, url: str, key: str) -> None:
    """Make the session's requests on several connections until this process is killed."""
    made, where = ATTACKS[kind](), urlsplit(url)

    def request(path: str, body: bytes, headers: str = "") -> bytes:
        bearer = "nobody" if made.keyless else key
        head = f"{made.method} {path} HTTP/1.1\r\nHost: {where.netloc}\r\nAuthorization: Bearer {bearer}\r\n{headers}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def connected() -> socket.socket:
        connection = socket.create_connection((where.hostname, where.port), 600)
        return unverified_tls().wrap_socket(connection) if made.tls else connection

    def post(data: bytes) -> None:
        with contextlib.suppress(OSError), connected() as connection:
            while made.sends:
                if not made.pause_s:
                    connection.sendall(data)
                else:
                    for at in range(0, len(data), 1000):
                        connection.sendall(data[at : at + 1000])
                        time.sleep(made.pause_s)
                if not made.reads:
                    time.sleep(600)
                read_response(connection)

    def repeat() -> None:
        while True:
            post(request(made.path, made.body, made.headers))
            time.sleep(made.again_s)

    prelude = connected()
    for i in range(made.first):
        prelude.sendall(request(CHAT, call(f"{i}")))
        read_response(prelude)
    print("ready", flush=True)
    for _ in range(made.connections):
        threading.Thread(target=repeat, daemon=True).start()
    threading.Event().wait()


def read_response(connection: socket.socket) -> None:
    """Read a response. Raises OSError if the server closes the connection, or will."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += received(connection)
    head, _, rest = data.partition(b"\r\n\r\n")
    head = head.lower()
    if b" 204 " in head:
        return
    if b"chunked" in head:
        while not rest.endswith(b"0\r\n\r\n"):
            rest = rest[-16:] + received(connection)
    else:
        left = int(head.partition(b"content-length:")[2].split(b"\r\n")[0]) - len(rest)
        while left > 0:
            left -= len(received(connection))


def received(connection: socket.socket) -> bytes:
    if data := connection.recv(2**18):
        return data
    raise ConnectionResetError


# --- the measurement ------------------------------------------------------------------------------------------


async def measure(kind: Kind, model: Path, rounds: int) -> dict[str, Any]:
    """Raises Unmeasured if calls wait for each other even without the hostile session."""
    conversation, cores = Conversation(model), sorted(os.sched_getaffinity(0))
    made = ATTACKS[kind.name]()
    engine_port, port = free_port(), free_port()
    with kept_folder() as work:
        keys = [f"session-{i}" for i in range(2 * rounds * SESSIONS)]
        system = System(port, f"http://127.0.0.1:{engine_port}", model, work, ["hostile", *keys])
        scheme = "https" if made.tls else "http"
        if made.tls:
            system.certificate = work / "certificate.pem"
            trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(system.certificate)
        argv = system.prepare("ours")
        answers = conversation.answers(LATENCY_S)
        hostile = Conversation(model)
        hostile.reply_ids = hostile.ids(f"{made.reply}<|im_end|>")
        answers["by_key"] = {"hostile": hostile.answers(0.0 if made.first else len(hostile.reply_ids) / 5000)}
        engine = [sys.executable, str(HERE / "engine_stub.py"), str(engine_port)]
        async with contextlib.AsyncExitStack() as servers:
            serve = servers.enter_async_context
            stdin = json.dumps(answers).encode()
            await serve(serving(engine, engine_port, work / "engine.log", cores[-1], stdin=stdin))
            pid = await serve(serving(argv, port, work / "gateway.log", cores[0], stdin=system.stdin, scheme=scheme))
            url, history = f"{scheme}://127.0.0.1:{port}{CHAT}", conversation.history(0)
            sessions = [
                Session(url, key, history, conversation.rest, conversation.results(0)) for key in system.keys[1:]
            ]
            for session in sessions:
                await session.call()
            client = [sys.executable, __file__, "--attack", kind.name, url, system.keys[0]]
            process = subprocess.Popen(client, stdout=subprocess.PIPE)
            try:
                os.sched_setaffinity(process.pid, {cores[-1]})
                assert process.stdout is not None
                await asyncio.to_thread(process.stdout.readline)
                await asyncio.sleep(WARM_S)
                took: dict[bool, list[float]] = {False: [], True: []}
                for number in range(2 * rounds):
                    beside = bool(number % 2)
                    process.send_signal(signal.SIGCONT if beside else signal.SIGSTOP)
                    await asyncio.sleep(WARM_S / 3)
                    if not beside:
                        await idle(pid)
                    group = sessions[number * SESSIONS : (number + 1) * SESSIONS]
                    took[beside] += await load(group)
            finally:
                process.kill()
                process.wait()
    if (alone_s := statistics.median(took[False])) > MAX_ALONE_S:
        raise Unmeasured(f"{alone_s:.2f} s are added to a call without the hostile session: the machine is too busy")
    found: dict[str, Any] = {}
    for name, cut in (("p50", 49), ("p99", 98)):
        alone, beside = (1000 * statistics.quantiles(took[each], n=100)[cut] for each in (False, True))
        found |= {f"{name}_alone_ms": alone, f"{name}_ms": beside, name: beside / alone}
    return found


async def idle(pid: int) -> None:
    """Wait until the process has done what the hostile session left to it, for a minute at most."""
    for _ in range(120):
        before = cpu_s(pid)
        await asyncio.sleep(0.5)
        if cpu_s(pid) - before <= 0.03:
            return


async def load(sessions: list[Session]) -> list[float]:
    """Let the sessions call at `RATE`, and return how long the gateway took for each call."""
    began, took = time.monotonic(), []

    async def converse(i: int) -> None:
        for turn in range(TURNS):
            due = began + (turn * len(sessions) + i) / RATE
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await sessions[i].call()
            took.append(time.monotonic() - due - LATENCY_S)

    await asyncio.gather(*map(converse, range(len(sessions))))
    return took


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--attack", nargs=3, help="be the hostile session of this kind, at this URL, with this key")
    options = parser.parse_args()
    if options.attack:
        attack(*options.attack)
    allow_files(1500)
    model, rounds = find_model(), 1 if options.smoke else options.rounds
    names = options.only[:2] if options.smoke else options.only
    compare(
        options.json,
        ["ours"],
        lambda _, kind: asyncio.run(measure(kind, model, rounds)),
        [Kind(name) for name in names],
    )


if __name__ == "__main__":
    main()
