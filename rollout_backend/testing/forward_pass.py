"""Recompute logprobs with a plain forward pass of transformers, to check stored logprobs against the model.

This file is a module and a script. An interpreter with torch and transformers, such as the engine's, runs the script,
which needs no other module of this package: `forward_pass.py MODEL` reads {"sequences", "temperatures", "adapters"}
on stdin and writes the logprobs for each adapter on stdout, both as JSON.
"""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# For this many positions, probabilities over the whole vocabulary are in memory at once.
_CHUNK = 512


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
    return adapter_logprobs(python, model, sequences, [None], temperatures)[0]


def adapter_logprobs(
    python: Path,
    model: Path,
    sequences: Sequence[Sequence[int]],
    adapters: Sequence[Path | None],
    temperatures: Sequence[float] | None = None,
) -> list[list[list[float]]]:
    """Return what `reference_logprobs` returns, for each of these LoRA adapters; None is the model without one.

    Raises:
        ServingError: a pass failed; the message carries the end of its output.
    """
    from rollout_backend.errors import ServingError

    temperatures = [1.0] * len(sequences) if temperatures is None else temperatures
    if len(temperatures) != len(sequences) or min(temperatures, default=1.0) <= 0:
        raise ValueError("temperatures must have one number above 0 for each sequence")
    done = subprocess.run(
        [str(python), "-I", __file__, str(model)],
        input=json.dumps(
            {
                "sequences": [list(ids) for ids in sequences],
                "temperatures": list(temperatures),
                "adapters": [None if folder is None else str(folder) for folder in adapters],
            }
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        tail = "\n".join(f"    {line}" for line in done.stderr.splitlines()[-15:])
        raise ServingError(f"the forward pass with {python} failed. The end of its output:\n{tail}")
    return [
        [[math.nan if value is None else value for value in row] for row in table]
        for table in json.loads(done.stdout)
    ]


def _apply_adapter(model: Any, folder: Path) -> None:
    """Add a LoRA adapter to the model's weights."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    weights = dict(model.named_parameters())
    for name, down in tensors.items():
        if ".lora_A." in name:
            up = tensors[name.replace(".lora_A.", ".lora_B.")]
            weight = weights[name.removeprefix("base_model.model.").replace(".lora_A.", ".")]
            weight.data += config["lora_alpha"] / config["r"] * (up.float() @ down.float())


def _main(model_path: str) -> None:
    import os

    # The variables must be set before transformers is imported.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    import torch
    from transformers import AutoModelForCausalLM

    request = json.load(sys.stdin)

    def logprobs(model: Any, ids: list[int], temperature: float) -> list[float | None]:
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

    def table(adapter: str | None) -> list[list[float | None]]:
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        if adapter is not None:
            _apply_adapter(model, Path(adapter))
        pairs = zip(request["sequences"], request["temperatures"], strict=True)
        return [logprobs(model, ids, temperature) for ids, temperature in pairs]

    json.dump([table(adapter) for adapter in request["adapters"]], sys.stdout)


if __name__ == "__main__":
    _main(sys.argv[1])
