"""Train a small model on sums with `rollout train`, on this machine: SkyRL serves Tinker's API with JAX on the CPU.

    python train.py             # 5 steps of SmolLM2-135M

The service has its own environment of 6 GB, in ~/.cache/rollout-backend. S3, SQS and the agent's runtime are local.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from agent_wrapper.contract import Rollout
from rollout_backend.errors import RolloutBackendError
from rollout_backend.model.serving.install import find_model
from rollout_backend.model.serving.server_process import ServerProcess, free_port
from rollout_backend.workbench.local.cloud import LocalCloud

AGENT = Path(__file__).parent.parent / "arithmetic" / "agent.py"
CACHE = Path("~/.cache/rollout-backend").expanduser()
SKYRL, SDK = "0.4.0", "0.25.0"
PROMPTS, GROUP, REPLY = 8, 4, 8
START_S = 600.0
Reply = tuple[tuple[int, ...], tuple[float, ...]]


def default_python() -> str:
    """Return a Python 3.12 of pyenv, whose shim uv cannot use, or else the version, which uv finds or downloads."""
    found = sorted(Path("~/.pyenv/versions").expanduser().glob("3.12*/bin/python"))
    return str(found[-1]) if found else "3.12"


def install(python: str) -> tuple[Path, Path]:
    """Return the environment of the service, and a folder with the version of the SDK that the service knows."""
    service, sdk = CACHE / f"skyrl-{SKYRL}", CACHE / f"tinker-{SDK}"
    pip = ["uv", "pip", "install", "--quiet"]
    if not (service / "complete").exists():
        # The server's metadata lacks aiohttp and httpx.
        packages = ["torch==2.13.0", f"skyrl[jax,tinker]=={SKYRL}", "aiohttp", "httpx"]
        subprocess.run(["uv", "venv", "--quiet", "--clear", "--python", python, str(service)], check=True)
        subprocess.run([*pip, "--python", str(service / "bin" / "python"), *packages], check=True)
        (service / "complete").touch()
    if not sdk.exists():
        subprocess.run([*pip, "--no-deps", "--target", str(sdk), f"tinker=={SDK}"], check=True)
    return service, sdk


def service_process(service: Path, model: Path, port: int, work: Path) -> ServerProcess:
    """Return the service, not started. It starts its engine by `uv run`, so it must be started in the same way."""
    backend = {
        "max_lora_adapters": 8,
        "max_lora_rank": 8,
        "sample_max_num_sequences": 32,
        "train_micro_batch_size": 8,
    }
    return ServerProcess(
        "SkyRL",
        [
            *("uv", "run", "--no-project", "--active", "-m", "skyrl.tinker.api"),
            *("--base-model", str(model), "--backend", "jax", "--backend-config", json.dumps(backend)),
            *("--checkpoints-base", str(work / "checkpoints"), "--database-url", f"sqlite:///{work / 'tinker.db'}"),
            *("--host", "127.0.0.1", "--port", str(port)),
        ],
        work / "skyrl.log",
        {**os.environ, "VIRTUAL_ENV": str(service), "JAX_PLATFORMS": "cpu"},
    )


def write_tasks(path: Path, count: int) -> Path:
    """Write sums of two single digits. Their prompts have equal lengths, as the service compiles for each length."""
    digits, lines = random.Random(0), []
    for a, b in digits.sample([(a, b) for a in range(1, 10) for b in range(1, 10)], count):
        payload = {"question": f"What is {a} + {b}? Answer with only a number.", "answer": str(a + b)}
        lines.append(json.dumps({"task_id": f"sum-{a}-{b}", "payload": payload}) + "\n")
    path.write_text("".join(lines))
    return path


def settings(cloud: LocalCloud, url: str, model: Path, steps: int) -> dict[str, Any]:
    return {
        **cloud.settings(),
        "run_id": f"train-service-{time.strftime('%m%d-%H%M%S')}",
        "model": {"path": str(model), "renderer": "chatml"},
        "sampling": {"temperature": 1.0, "max_tokens": REPLY},
        "group": {"size": GROUP},
        # The first call of each shape waits until it is compiled.
        "timeouts": {"model_call_s": 900, "agent_s": 1200, "collection_s": 1800, "session_key_s": 2400},
        "training_service": {
            "base_url": url,
            "base_model": str(model),
            "rank": 8,
            "steps": steps,
            "tasks_per_step": PROMPTS,
            "learning_rate": 1e-3,
        },
    }


def compare_tokens(database: Path, run: Path) -> str:
    """Return how many replies of a run, and how many rows that were trained, have the tokens and logprobs that SkyRL
    sampled, by its own records.

    Raises:
        ValueError: one has others.
    """
    sampled, trained = set[Reply](), list[Reply | None]()
    with contextlib.closing(sqlite3.connect(database)) as service:
        done = "SELECT lower(request_type), request_data, result_data FROM futures WHERE lower(status) = 'completed'"
        for kind, asked, answer in service.execute(done):
            request = json.loads(asked)
            if kind == "sample":
                prompt = ids_of(request["prompt"])
                replies = json.loads(answer)["sequences"]
                sampled |= {reply_of(prompt + each["tokens"], each["logprobs"]) for each in replies}
            elif kind == "forward_backward":
                trained += map(reply_in, request["data"])
    stored = [
        reply_of(segment.token_ids[: turn.end], segment.logprobs[turn.start : turn.end])
        for path in sorted((run / "rollouts").glob("*/*"))
        if "~" not in path.name
        for segment in Rollout.decode(path.read_bytes()).segments
        for turn in segment.turns
    ]
    for name, found in (("replies", stored), ("trained rows", trained)):
        if wrong := sum(each not in sampled for each in found):
            raise ValueError(f"{wrong} of {len(found)} {name} have other tokens or logprobs than SkyRL sampled")
    return f"SkyRL sampled all tokens and logprobs of {len(stored)} replies and {len(trained)} trained rows"


def ids_of(model_input: dict[str, Any]) -> list[int]:
    return [token for chunk in model_input["chunks"] for token in chunk["tokens"]]


def reply_of(ids: Sequence[int], logprobs: Sequence[float]) -> Reply:
    """Return a prompt with its reply, and the reply's logprobs as the service computes them, in single precision."""
    return tuple(ids), tuple(array("f", logprobs))


def reply_in(datum: dict[str, Any]) -> Reply | None:
    """Return the reply in a row, whose agent makes one call; None if its targets are not its tokens."""
    tokens, inputs = ids_of(datum["model_input"]), datum["loss_fn_inputs"]
    targets, logprobs, advantages = (inputs[name]["data"] for name in ("target_tokens", "logprobs", "advantages"))
    if tokens[1:] != targets[:-1]:
        return None
    is_sampled = zip(logprobs, advantages, strict=True)
    return reply_of([*tokens, targets[-1]], [logprob for logprob, advantage in is_sampled if advantage])


async def answers(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/api/v1/healthz") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def train(steps: int, model: Path, work: Path, python: str) -> int:
    """Train, and return the exit code of `rollout train`.

    Raises:
        RolloutBackendError: the service does not start.
    """
    service, sdk = await asyncio.to_thread(install, python)
    url = f"http://127.0.0.1:{(port := free_port('127.0.0.1'))}"
    skyrl = service_process(service, model, port, work)
    await skyrl.start()
    try:
        await skyrl.wait_healthy(lambda: answers(url), START_S)
        async with LocalCloud(AGENT, run_dir=work / "cloud") as cloud:
            config = work / "config.yaml"
            config.write_text(yaml.safe_dump(settings(cloud, url, model, steps)))
            tasks = write_tasks(work / "tasks.jsonl", 64)
            command = ["-m", "rollout_backend", "train", str(config), "--tasks", str(tasks)]
            paths = os.pathsep.join([str(sdk), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
            environ = {**os.environ, **cloud.environ, "PYTHONPATH": paths, "TINKER_API_KEY": "tml-local"}
            process = await asyncio.create_subprocess_exec(sys.executable, *command, env=environ)
            if (code := await process.wait()) == 0:
                run = Path("runs") / yaml.safe_load(config.read_text())["run_id"]
                print(await asyncio.to_thread(compare_tokens, work / "tinker.db", run))
            return code
    finally:
        await skyrl.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="training steps")
    parser.add_argument("--model", type=Path, help="a model folder; default: the one of `rollout engine install`")
    parser.add_argument("--python", default=default_python(), help="Python of the service: a version or a path")
    parser.add_argument("--work", type=Path, default=Path("runs/train_service"), help="output directory")
    options = parser.parse_args()
    model = (options.model or find_model()).absolute()
    options.work.mkdir(parents=True, exist_ok=True)
    try:
        raise SystemExit(asyncio.run(train(options.steps, model, options.work.absolute(), options.python)))
    except (RolloutBackendError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
