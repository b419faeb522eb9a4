"""verl's real trainer on rollouts with images computes the same probabilities as the engine."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from PIL import Image
from transformers import PreTrainedTokenizerFast

from rollout_backend.local.scripted import BYTE_MODEL
from rollout_backend.serving.install import cache_dir
from trainings import SAME, normal

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.release, pytest.mark.timeout(1800)]

TORCHVISION = "torchvision==0.28.0"  # for torch 2.13
DECLARED = """\
import torch
for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
WORDS = ["tool_call", "think", "tool_response"]  # that the family's renderer requires
SEEING = Path(__file__).parents[1] / "rendering" / "families" / "seeing_model.py"


def make_seeing_model(folder: Path) -> Path:
    """Make a tiny Qwen3-VL with random weights and a token for each byte."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BYTE_MODEL)
    vision = ["vision_start", "vision_end", "image_pad", "video_pad"]
    tags = [tag for word in WORDS for tag in (f"<{word}>", f"</{word}>")]
    tokenizer.add_special_tokens({"additional_special_tokens": [*(f"<|{name}|>" for name in vision), *tags]})
    tokenizer.save_pretrained(folder)
    of_kind = dict(zip(vision, tokenizer.convert_tokens_to_ids([f"<|{name}|>" for name in vision]), strict=True))
    text = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    of_images = {
        "image_token_id": of_kind["image_pad"],
        "video_token_id": of_kind["video_pad"],
        "vision_start_token_id": of_kind["vision_start"],
        "vision_end_token_id": of_kind["vision_end"],
    }
    seeing = runpy.run_path(str(SEEING))
    with torch.random.fork_rng(devices=[]):
        made = seeing["model_of"](text, of_images)
    # The gateway forbids the tokens that stand for images, so logprobs leave them out: the model gives them nothing.
    # After each text token the first dimension is positive, since no layer writes there.
    with torch.no_grad():
        made.get_input_embeddings().weight[:, 0] = 10.0
        for layer in made.model.language_model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        head = made.lm_head.weight
        head[:, 0] = 0.0
        head[[of_kind["image_pad"], of_kind["video_pad"]], 0] = -1000.0
    seeing["save"](made, folder)
    return folder


def picture(colour: str, width: int, height: int) -> str:
    made = Image.composite(
        Image.new("RGB", (width, height), colour),
        Image.new("RGB", (width, height), "white"),
        Image.linear_gradient("L").resize((width, height)),
    )
    made.save(out := io.BytesIO(), "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def shown(name: str, *image: Any, **more: Any) -> dict[str, Any]:
    return normal(name, image=picture(*image), **more)


@pytest.fixture
def with_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's processes can import torchvision, which the model's processor needs.

    PyPI's wheel needs the libraries of a torch for GPUs. On another one its operators, which are not called here, are
    declared instead of loaded: only then can it be imported.
    """
    if importlib.util.find_spec("torchvision"):
        return
    folder = cache_dir() / f"{TORCHVISION}-declared"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            half_made = folder.with_name(f"{folder.name}.part")
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
            subprocess.run([*pip, "--target", half_made, TORCHVISION], check=True)
            first = half_made / "torchvision" / "__init__.py"
            first.write_text(DECLARED + first.read_text())
            half_made.rename(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))


@pytest.mark.usefixtures("with_torchvision")
async def test_a_vision_model_is_trained_on_the_images_that_it_saw(tmp_path: Path, training: Any) -> None:
    """One group has images that fit the model's grid, one has images that are scaled, and one has none."""
    tasks = [shown("tall", "red", 90, 130), shown("wide", "blue", 160, 64, segments=2)]
    tasks += [shown("small", "green", 100, 70), normal("blind")]
    model = make_seeing_model(tmp_path / "seeing")
    more = [f"actor_rollout_ref.model.path={model}", "data.max_prompt_length=160"]
    more += [f"algorithm.rollout_correction.rollout_rs{name}" for name in ("=seq_mean_k3", "_threshold=0.01")]
    async with training(tmp_path, tasks, 2, *more, backend={"model": {"renderer": "qwen3-vl"}}) as run:
        await run.start()
        assert await run.ends(1500) == 0, run.verl.log_tail()
        for metrics in run.metrics():
            assert metrics["training/rollout_probs_diff_max"] < SAME, "training used other pixels or positions"
            assert metrics["actor/grad_norm"] > 0
            assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 0
        assert [run.versions(step) for step in (1, 2)] == [{"0"}, {"1"}]
        seen = [[len(s.images) for r in run.rollouts(step) for s in r.segments] for step in (1, 2)]
        assert [sorted(of_step) for of_step in seen] == [[1] * 12, [0] * 4 + [1] * 4]
        assert [report.trainable for report in run.reports()] == [8, 8]
        assert json.loads((run.run_dir / "run.json").read_text())["starts"][-1]["state"] == "ended", (
            "it was not closed at exit"
        )
        await run.leaves_nothing()
