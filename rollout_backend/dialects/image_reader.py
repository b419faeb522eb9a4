"""Read the images of one request. Pure.

Invariant: only bytes within the request are read. No URL is fetched and no path is opened, because a request could
then read with the gateway's rights.
"""

import base64
import binascii
import re

from rollout_backend.core.images import Image, ImageLimits, read_image
from rollout_backend.dialects.fields import refused

_DATA_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)


class ImageReader:
    """Reads the images of a request one by one. If `limits` is None, refuses images with the message `text_only`."""

    def __init__(self, limits: ImageLimits | None, text_only: str) -> None:
        self.found: dict[str, Image] = {}
        self._limits = limits
        self._text_only = text_only
        self._read = 0

    @property
    def taken(self) -> bool:
        return self._limits is not None

    def url(self, url: str, where: str) -> Image:
        """Read a data URL. Raises ApiError (400) if it contains no image, or the request has too many."""
        if not self.taken:
            raise refused(where, self._text_only)
        head = _DATA_URL.match(url)
        if head is None:
            raise refused(where, "images are not fetched: send the image itself, as data:image/png;base64,...")
        return self.base64(url[head.end() :], where)

    def base64(self, text: str, where: str) -> Image:
        """Decode an image from base64. Raises ApiError (400) if it is invalid or the request has too many images."""
        if self._limits is None:
            raise refused(where, self._text_only)
        self._read += 1
        if self._read > self._limits.per_request:
            raise refused(where, f"more than {self._limits.per_request} images in one request; send fewer")
        try:
            image = read_image(base64.b64decode(text, validate=True), self._limits.pixels)
        except binascii.Error:
            raise refused(where, "is not base64") from None
        except ValueError as error:
            raise refused(where, str(error)) from None
        self.found[image.sha256] = image
        return image
