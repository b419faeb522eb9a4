"""Validate images sent by agents, and replace them in messages by the SHA-256 of their bytes.

Invariant: an image's bytes are part of the request. This module opens no path or URL.
"""

import base64
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image as pillow

from agent_wrapper.contract import ImageSpan

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MEDIA_TYPES = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "MPO": "image/jpeg",  # from cameras, with further pictures after the first
    "WEBP": "image/webp",
    "GIF": "image/gif",
}
_NAME = "sha256:"
_MIN_SIDE = 4  # image processors mistake a side of 1 or 3 for the colour channels


@dataclass(frozen=True)
class ImageLimits:
    per_request: int
    pixels: int  # maximum per image


@dataclass(frozen=True)
class Image:
    """An image. Its size is read from its header. For an animated image, only the first frame counts."""

    data: bytes = field(repr=False)
    sha256: str
    media_type: str
    width: int
    height: int

    @property
    def part(self) -> dict[str, Any]:
        """Return the content part for a message, in the format of OpenAI's chat API."""
        return {"type": "image_url", "image_url": {"url": _NAME + self.sha256}}

    @property
    def data_url(self) -> str:
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode('ascii')}"


@dataclass(frozen=True)
class PlacedImage:
    """An image, and the prompt tokens `[start, end)` that represent it."""

    start: int
    end: int
    image: Image

    @property
    def span(self) -> ImageSpan:
        return ImageSpan(start=self.start, end=self.end, sha256=self.image.sha256, media_type=self.image.media_type)


def read_image(data: bytes, max_pixels: int) -> Image:
    """Identify an image by its header, not by its declared media type. The pixels are not decoded.

    Raises:
        ValueError: the format is not supported, or the image has too many or too few pixels.
    """
    try:
        with pillow.open(io.BytesIO(data), formats=_FORMATS) as opened:
            (width, height), kind = opened.size, opened.format
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):
        raise ValueError(f"has more than {max_pixels} pixels; send a smaller one") from None
    except Exception:  # Pillow's readers raise various exceptions, depending on the format
        raise ValueError("is no PNG, JPEG, WebP or GIF that can be read") from None
    if width * height > max_pixels:
        raise ValueError(f"has {width} x {height} pixels, more than {max_pixels} in all; send a smaller one")
    if min(width, height) < _MIN_SIDE:
        raise ValueError(f"has {width} x {height} pixels; send one of at least {_MIN_SIDE} each way")
    assert kind is not None
    return Image(data, hashlib.sha256(data).hexdigest(), _MEDIA_TYPES[kind], width, height)


def check_pixels(image: Image) -> None:
    """Decode all pixels, so that no engine receives an image that it cannot decode.

    Raises:
        ValueError: the image is corrupt or truncated.
    """
    try:
        with pillow.open(io.BytesIO(image.data), formats=_FORMATS) as opened:
            opened.load()
    except Exception as error:
        raise ValueError(f"cannot be read to its end: {error}") from None


def collapse_images(ids: Sequence[int], placed: Sequence[PlacedImage]) -> Sequence[int]:
    """Return the ids with one token per image, which is the form that engines accept."""
    found: list[int] = []
    at = 0
    for place in placed:
        found += ids[at : place.start + 1]
        at = place.end
    return [*found, *ids[at:]]


def image_names(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the SHA-256 of each image in the messages, in order and with repetitions."""
    return [
        part["image_url"]["url"].removeprefix(_NAME)
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]
