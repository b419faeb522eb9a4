"""How a model sees images: how many tokens each takes in a prompt, and where they stand. Pure.

What must always hold:

- The renderer is asked for the places of images alone, one token for each, and never gets an image: it would open
  paths and URLs.
- A prompt has as many such tokens as the engine makes of the image, by the rule of the model's own image processor.
  The pixels are the engine's matter, and the trainer's: nothing is resized here.
- In a conversation with images the model samples none of these tokens: one without an image behind it is a prompt
  that no engine takes and a row that no model can be trained on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_backend.gateway.images import Image, Placed

_RENDERERS = frozenset({"qwen3-vl"})  # whose place of an image is one token, repeated
_PROCESSORS = frozenset({"Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"})


@dataclass(frozen=True)
class Vision:
    """Of one model. `pad_id` is the token that stands for a piece of an image; it and others of its kind, which
    are `unsayable`, mean something only where an image or a video is."""

    pad_id: int
    unsayable: tuple[int, ...]
    processor: Any

    def tokens(self, image: Image) -> int:
        """How many the image takes.

        Raises:
            ValueError: the model takes no image of this shape.
        """
        patches = self.processor.get_number_of_image_patches(image.height, image.width, {})  # None fails in 5.10
        return int(patches // self.processor.merge_size**2)

    def expanded(
        self, ids: Sequence[int], images: Sequence[Image], start: int = 0
    ) -> tuple[list[int], tuple[Placed, ...]]:
        """The ids with each place as long as its image is; `start` tokens of the prompt are before them.

        Raises:
            ValueError: there are not as many places as images.
        """
        if ids.count(self.pad_id) != len(images):
            raise ValueError(f"the model's format has {ids.count(self.pad_id)} places for {len(images)} images")
        expanded: list[int] = []
        placed = []
        remaining = iter(images)
        for token in ids:
            n = 1
            if token == self.pad_id:
                image = next(remaining)
                n = self.tokens(image)
                at = start + len(expanded)
                placed.append(Placed(at, at + n, image))
            expanded += [token] * n
        return expanded, tuple(placed)


def collapsed(ids: Sequence[int], placed: Sequence[Placed]) -> list[int]:
    """The ids with one token for each image: the way back, and what an engine is sent beside the images."""
    found: list[int] = []
    at = 0
    for place in placed:
        found += ids[at : place.start + 1]
        at = place.end
    return [*found, *ids[at:]]


def prepares_images(path: Path) -> bool:
    """Whether the model in `path` has an image processor whose rule is known here."""
    for file in (path / "processor_config.json", path / "preprocessor_config.json"):
        if file.is_file():
            found = json.loads(file.read_text())
            kind = found.get("image_processor", found).get("image_processor_type")
            if kind is not None:
                return kind in _PROCESSORS
    return False


def load_vision(path: Path, renderer: str, tokenizer: Any) -> Vision | None:
    """What the model in `path` and its renderer can do with images; None if that is nothing."""
    if renderer not in _RENDERERS or not prepares_images(path):
        return None
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # late: is slow

    processor = Qwen2VLImageProcessorPil.from_pretrained(str(path), local_files_only=True)
    pads = tuple(tokenizer.convert_tokens_to_ids(name) for name in ("<|image_pad|>", "<|video_pad|>"))
    return Vision(pads[0], pads, processor)
