"""Compute the positions and lengths of images in a prompt. Pure.

Invariants:

- The renderer only places images, as one token each, and never receives one: it would open paths and URLs.
- An image has as many tokens in the prompt as in the engine, according to the model's image processor. The engine and
  the trainer process the pixels; nothing is resized here.
- In a conversation with images, the model samples none of these tokens: an engine refuses a prompt with such a token
  but no image, and a model cannot be trained on it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_backend.model.images import Image, PlacedImage

# These renderers represent an image by one repeated token.
_RENDERERS = frozenset({"qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8"})
_PROCESSORS = frozenset({"Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"})


@dataclass(frozen=True)
class Vision:
    """Image processing of one model.

    `pad_id` is the token whose repetitions represent an image. Tokens in `reserved_ids` are valid only within an
    image or video.
    """

    pad_id: int
    reserved_ids: tuple[int, ...]
    processor: Any

    def tokens(self, image: Image) -> int:
        """Return the number of tokens of an image.

        Raises:
            ValueError: the model does not accept an image of this shape.
        """
        # transformers 5.10 fails if the last argument is None instead of {}.
        patches = self.processor.get_number_of_image_patches(image.height, image.width, {})
        return int(patches // self.processor.merge_size**2)

    def expand(
        self, ids: Sequence[int], images: Sequence[Image], start: int = 0
    ) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Return the ids with each image token repeated to the length of its image.

        `start` is the number of tokens that precede these ids in the prompt.

        Raises:
            ValueError: the number of image tokens differs from the number of images.
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
                placed.append(PlacedImage(at, at + n, image))
            expanded += [token] * n
        return expanded, tuple(placed)


def prepares_images(path: Path) -> bool:
    """Return whether the model in `path` has a supported image processor."""
    for file in (path / "processor_config.json", path / "preprocessor_config.json"):
        if file.is_file():
            found = json.loads(file.read_text())
            kind = found.get("image_processor", found).get("image_processor_type")
            if kind is not None:
                return kind in _PROCESSORS
    return False


def load_vision(path: Path, renderer: str, tokenizer: Any) -> Vision | None:
    """Return the image processing of the model in `path`; None if the model or its renderer takes no images."""
    if renderer not in _RENDERERS or not prepares_images(path):
        return None
    # This import is slow.
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil.from_pretrained(str(path), local_files_only=True)
    pads = tuple(tokenizer.convert_tokens_to_ids(name) for name in ("<|image_pad|>", "<|video_pad|>"))
    return Vision(pads[0], pads, processor)
