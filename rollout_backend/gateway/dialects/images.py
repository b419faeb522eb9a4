"""The images of one request. Pure.

What must always hold: only bytes that stand in the request are taken. A URL is never fetched and a path never opened,
for it would be this side that reads them.
"""

from __future__ import annotations

import base64
import binascii
import re

from rollout_backend.gateway.dialects.wire import refused
from rollout_backend.gateway.images import Image, ImageLimits, read_image

_DATA_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)


class ImageReader:
    """Reads them one by one. `limits` is None where the model takes text only; what is said then is the dialect's."""

    def __init__(self, limits: ImageLimits | None, text_only: str) -> None:
        self.found: dict[str, Image] = {}
        self._limits = limits
        self._text_only = text_only
        self._read = 0

    @property
    def taken(self) -> bool:
        return self._limits is not None

    def url(self, url: str, where: str) -> Image:
        """Raises ApiError (400): it is none that holds an image, or one too many."""
        if not self.taken:
            raise refused(where, self._text_only)
        head = _DATA_URL.match(url)
        if head is None:
            raise refused(where, "nothing is fetched here: send the image itself, as data:image/png;base64,...")
        return self.base64(url[head.end() :], where)

    def base64(self, text: str, where: str) -> Image:
        """Raises ApiError (400): it is no image, or one too many."""
        if self._limits is None:
            raise refused(where, self._text_only)
        self._read += 1
        if self._read > self._limits.per_request:
            raise refused(where, f"more than {self._limits.per_request} images in one request; send fewer")
        try:
            image = read_image(base64.b64decode(text, validate=True), self._limits.pixels)
        except binascii.Error:
            raise refused(where, "is no base64") from None
        except ValueError as error:
            raise refused(where, str(error)) from None
        self.found[image.sha256] = image
        return image
