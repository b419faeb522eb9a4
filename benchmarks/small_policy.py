"""A policy of 400 weights, and an engine that samples from it.

The engine writes what it samples to a log, with a digest of the bytes that it loaded. The trainer
(`policy_trainer.py`) writes what it trains to another, with a digest of the bytes that it wrote. `row_origins.py`
compares the two.
"""

import asyncio
import hashlib
import json
import random
import re
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from common import append
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rollout_backend.workbench.local.scripted import BYTE_MODEL, ScriptedEngine

ANSWERS = 20
_SUM = re.compile(r"what is (\d+) \+ (\d+)\?")

Policy = NDArray[np.float32]
"""The logits of each answer to each sum."""


def write_model(folder: Path, policy: Policy) -> str:
    """Write a model folder, and return the digest of its weights."""
    shutil.copytree(BYTE_MODEL, folder, dirs_exist_ok=True)
    save_file({"policy": policy}, folder / "model.safetensors")
    return digest_of(folder)


def digest_of(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]


def sum_of(text: str) -> int:
    """Return the first sum that a text asks for."""
    a, b = map(int, _SUM.findall(text)[0])
    return a + b


def probabilities(logits: Policy) -> Policy:
    powers = np.exp(logits - logits.max())
    return np.asarray(powers / powers.sum())


def true_time() -> float:
    """Return unix seconds by this machine's clock, also in a trainer whose `time.time` is wrong."""
    return time.clock_gettime(time.CLOCK_REALTIME)


class PolicyEngine(ScriptedEngine):
    """Samples from the policy that it loaded last. Each answer has a stamp, so no two have the same tokens."""

    def __init__(self, model: Path, port: int, log: Path, answer_s: tuple[float, float]) -> None:
        super().__init__((), port=port)
        self._log, self._answer_s = log, answer_s
        self._load(model, "0")

    def _load(self, model: Path, version: str) -> None:
        self._policy, self._digest = load_file(model / "model.safetensors")["policy"], digest_of(model)
        self.weight_version = version

    def _routes(self) -> list[Route]:
        return [Route("/update_weights_from_disk", self._update, methods=["POST"]), *super()._routes()]

    async def _update(self, request: Request) -> JSONResponse:
        body = await request.json()
        self._load(Path(body["model_path"]), body["weight_version"])
        return JSONResponse({"success": True, "message": ""})

    async def _reply(self, session: str, body: Mapping[str, Any]) -> str:
        self.requests.clear()  # kept for tests, and would grow
        await asyncio.sleep(random.uniform(*self._answer_s))
        prompt = self.tokenizer.decode(body["input_ids"], skip_special_tokens=False)
        logits = self._policy[sum_of(prompt)].astype(np.float64)
        sampled = np.random.default_rng().choice(ANSWERS, p=probabilities(logits))
        text = f"{secrets.token_hex(4)}: the answer is {sampled}."
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False).ids, self._end]
        append(
            self._log,
            {
                "at": true_time(),
                "weights": self._digest,
                "version": self.weight_version,
                "prompt_ids": body["input_ids"],
                "prompt": prompt,
                "tokens": tokens,
                "text": text,
            },
        )
        return text


def serve_engine(model: str, port: str, settings: str) -> None:
    log, answer_s = json.loads(settings)
    with PolicyEngine(Path(model), int(port), Path(log), answer_s):
        signal.sigwait({signal.SIGINT})  # SIGTERM ends it as it ends any process


if __name__ == "__main__":
    serve_engine(*sys.argv[2:])
