"""Run a process that scores rollouts: `python -m rollout_backend.run.scoring.worker SETTINGS`.

It is separate from the trainer, so that a slow scorer does not delay collection, and a scorer that hangs or crashes
can be killed. A plain function scores one rollout at a time; an async function scores all pending ones in one event
loop. A frame on stdin or stdout is the number of a call (8 bytes), a length (4 bytes) and msgpack. An empty frame
cancels a call.

Invariants:

- The scorer's output goes to stderr and cannot be taken for a score.
- The process and its children end with the trainer: all of them are killed when stdin closes.
"""

import asyncio
import contextlib
import json
import os
import queue
import signal
import struct
import sys
import threading
from typing import Any, BinaryIO

import msgpack

from agent_wrapper.contract import ContractError
from agent_wrapper.shared.processes import MARK, boot_clock, end_marked
from rollout_backend.base.logs import report_failure
from rollout_backend.errors import ConfigError
from rollout_backend.run.scoring.scorer import ScoreInput, Scorer, ScoringError, configured_scorer

# The number of a call, and the length of its message.
HEADER = struct.Struct(">QI")
_Requests = queue.SimpleQueue[tuple[int, bytes]]


def main(settings: str) -> None:
    """Load the scorer, send its name and digest, and then answer each rollout with its score."""
    frames, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    requests: _Requests = queue.SimpleQueue()
    threading.Thread(target=_read_all, args=(frames, requests, boot_clock()), daemon=True).start()
    try:
        # With no time limit here, a command ends with its children: see `WorkerPool.call`.
        scorer = configured_scorer({**json.loads(settings), "timeout_s": None})
    except ConfigError as error:
        _answer(answers, 0, {"error": str(error)})
        return
    _answer(answers, 0, {"scorer": scorer.name, "sha256": scorer.sha256, "is_async": scorer.is_async})
    if scorer.is_async:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        serving = loop.create_task(_serve(scorer, requests, answers, json.loads(settings)["timeout_s"]))
        while True:
            with contextlib.suppress(SystemExit):
                # A scorer's task raised SystemExit and gets it too. The other tasks continue.
                loop.run_until_complete(serving)
    while True:
        number, body = requests.get()
        if body:
            try:
                score = scorer.score(ScoreInput.unpack(body)).model_dump()
            except (ContractError, ScoringError) as error:
                score = {"error": str(error)}
            _answer(answers, number, score)


async def _serve(scorer: Scorer, requests: _Requests, answers: BinaryIO, timeout_s: float) -> None:
    """Score rollouts concurrently. The sender limits their number."""
    calls: dict[int, asyncio.Task[None]] = {}

    async def score(number: int, body: bytes) -> None:
        try:
            _answer(answers, number, await score_async(scorer, body, timeout_s))
        finally:
            del calls[number]

    while True:
        number, body = await asyncio.to_thread(requests.get)
        if body:
            calls[number] = asyncio.create_task(score(number, body))
            calls[number].add_done_callback(report_failure("a scorer"))
        elif number in calls:
            calls[number].cancel()


async def score_async(scorer: Scorer, body: bytes, timeout_s: float) -> dict[str, Any]:
    try:
        async with asyncio.timeout(timeout_s):
            return (await scorer.score_async(ScoreInput.unpack(body))).model_dump()
    except (ContractError, ScoringError) as error:
        return {"error": str(error)}
    except TimeoutError:
        return {"error": f"the scorer took longer than scoring.timeout_s={timeout_s:g}"}


def _read_all(frames: BinaryIO, requests: _Requests, began_at: float) -> None:
    while len(head := frames.read(HEADER.size)) == HEADER.size:
        number, length = HEADER.unpack(head)
        requests.put((number, frames.read(length)))
    if (mark := os.environ.get(MARK)) is not None:
        # This ends the children in other process groups.
        end_marked(mark, began_at)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _answer(answers: BinaryIO, number: int, fields: dict[str, Any]) -> None:
    # An error message may quote half of a surrogate pair.
    data = msgpack.packb(fields, unicode_errors="replace")
    answers.write(HEADER.pack(number, len(data)) + data)
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
