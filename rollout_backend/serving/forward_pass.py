"""Recompute logprobs with a plain forward pass of transformers, to check stored logprobs against the model.

This file is a module and a script. An interpreter with torch and transformers, such as the engine's, runs the script,
which needs no other module of this package: `forward_pass.py MODEL` reads {"sequences", "temperatures"} on stdin and
writes the logprobs on stdout, both as JSON.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_CHUNK = 512  # positions whose probabilities over the whole vocabulary are in memory at once


def reference_logprobs(
    python: Path,
    model: Path,
    sequences: Sequence[Sequence[int]],
    temperatures: Sequence[float] | None = None,
) -> list[list[float]]:
    """Return the logprob of each token of each sequence, given the tokens before it, in float32 on the CPU.

    `python` is an interpreter with torch and transformers, `model` a model folder. `temperatures` has one
    number above 0 per sequence, by default 1. The first token of a sequence has no context: its logprob is NaN.
    Blocks: seconds to load the model, then one pass for each sequence.

    Raises:
        ServingError: the pass failed; the message carries the end of its output.
    """
    from rollout_backend.errors import ServingError

    temperatures = [1.0] * len(sequences) if temperatures is None else temperatures
    if len(temperatures) != len(sequences) or min(temperatures, default=1.0) <= 0:
        raise ValueError("temperatures must have one number above 0 for each sequence")
    done = subprocess.run(
        [str(python), "-I", __file__, str(model)],
        input=json.dumps({"sequences": [list(ids) for ids in sequences], "temperatures": list(temperatures)}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        tail = "\n".join(f"    {line}" for line in done.stderr.splitlines()[-15:])
        raise ServingError(f"the forward pass with {python} failed. The end of its output:\n{tail}")
    return [[math.nan if value is None else value for value in row] for row in json.loads(done.stdout)]


def _main(model_path: str) -> None:
    import os

    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # before transformers is imported
    import torch
    from transformers import AutoModelForCausalLM

    request = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()

    def logprobs(ids: list[int], temperature: float) -> list[float | None]:
        if not ids:
            return []
        out: list[float | None] = [None]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
            for start in range(0, len(ids) - 1, _CHUNK):
                stop = min(start + _CHUNK, len(ids) - 1)
                rows = torch.log_softmax(logits[start:stop].float() / temperature, dim=-1)
                out += rows.gather(1, torch.tensor(ids[start + 1 : stop + 1])[:, None])[:, 0].tolist()
        return out

    pairs = zip(request["sequences"], request["temperatures"], strict=True)
    json.dump([logprobs(ids, temperature) for ids, temperature in pairs], sys.stdout)


if __name__ == "__main__":
    _main(sys.argv[1])
