"""Validate images sent by agents, convert them to plain PNGs, and replace them in messages by their SHA-256.

Invariants:

- An image's bytes are part of the request. This module opens no path or URL.
- Engine, result and trainer get the same plain PNG: RGB with 8 bits per channel, without metadata. Decoders read
  other images differently: SGLang decodes JPEGs on the GPU, and some decoders ignore the orientation in EXIF.
"""

import base64
import hashlib
import io
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image as pillow
from PIL import ImageOps

from agent_wrapper.contract import ImageSpan

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_NAME = "sha256:"
_PNG = "image/png"
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_DEEP_MODES = frozenset({"I", "F", "I;16", "I;16B", "I;16L", "I;16N"})
_CACHED_BYTES = 64 * 2**20
# Image processors mistake a side of 1 or 3 for the colour channels.
_MIN_SIDE = 4


@dataclass(frozen=True)
class ImageLimits:
    per_request: int
    pixels: int
    """Maximum per image."""


@dataclass(frozen=True)
class Image:
    """A plain PNG."""

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


class _Converted:
    """A cache of converted images by the SHA-256 of the original. Agents send an image again with each call."""

    def __init__(self) -> None:
        self._images: OrderedDict[bytes, Image] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, sent: bytes) -> Image | None:
        with self._lock:
            if sent in self._images:
                self._images.move_to_end(sent)
            return self._images.get(sent)

    def add(self, sent: bytes, image: Image) -> None:
        with self._lock:
            if sent not in self._images:
                self._bytes += len(image.data)
            self._images[sent] = image
            while self._bytes > _CACHED_BYTES:
                self._bytes -= len(self._images.popitem(last=False)[1].data)


_converted = _Converted()


def read_image(data: bytes, max_pixels: int) -> Image:
    """Return an image as a plain PNG. The format is detected from the bytes, not from the declared media type.

    The EXIF orientation is applied, transparent pixels become white, and an animation is reduced to its first frame.
    A plain PNG is returned unchanged, without decoding its pixels.

    Raises:
        ValueError: the format is not supported, the image has too many or too few pixels, or it is corrupt.
    """
    try:
        with pillow.open(io.BytesIO(data), formats=_FORMATS) as opened:
            (width, height), mode = opened.size, opened.mode
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):
        raise ValueError(f"has more than {max_pixels} pixels; send a smaller one") from None
    # Pillow's readers raise various exceptions, depending on the format.
    except Exception:
        raise ValueError("is no PNG, JPEG, WebP or GIF that can be read") from None
    if width * height > max_pixels:
        raise ValueError(f"has {width} x {height} pixels, more than {max_pixels} in all; send a smaller one")
    if min(width, height) < _MIN_SIDE:
        raise ValueError(f"has {width} x {height} pixels; send one of at least {_MIN_SIDE} each way")
    if mode in _DEEP_MODES:
        raise ValueError("has more than 8 bits per pixel in one channel; send one with 8 bits per channel")
    sent = hashlib.sha256(data)
    if _is_plain(data):
        return Image(data, sent.hexdigest(), _PNG, width, height)
    image = _converted.get(sent.digest())
    if image is None:
        image = _convert(data)
        _converted.add(sent.digest(), image)
    return image


def _is_plain(data: bytes) -> bool:
    """Return whether the bytes are a non-interlaced RGB PNG with 8 bits per channel and no metadata."""
    if not data.startswith(_SIGNATURE) or data[24:29] != b"\x08\x02\0\0\0":
        return False
    at, kinds = len(_SIGNATURE), []
    while at + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        kinds.append(kind)
        at += length + 12
    return at == len(data) and kinds[0] == b"IHDR" and kinds[-1] == b"IEND" and {*kinds[1:-1]} == {b"IDAT"}


def _convert(data: bytes) -> Image:
    written = io.BytesIO()
    try:
        with pillow.open(io.BytesIO(data), formats=_FORMATS) as opened:
            opened.load()
            image: pillow.Image = ImageOps.exif_transpose(opened)
        if image.has_transparency_data:
            rgba = image.convert("RGBA")
            image = pillow.new("RGB", rgba.size, "white")
            image.paste(rgba, mask=rgba.getchannel("A"))
        pixels = image.convert("RGB")
        # `save` would copy the metadata of `pixels`.
        plain = pillow.frombytes("RGB", pixels.size, pixels.tobytes())
        plain.save(written, "PNG", compress_level=1)
    except Exception as error:
        raise ValueError(f"cannot be read to its end: {error}") from None
    png = written.getvalue()
    return Image(png, hashlib.sha256(png).hexdigest(), _PNG, *plain.size)


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
    """Return the ids with one token per image, as engines expect them."""
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
