"""Set the weight version that verl's servers report, so that each token carries the version that sampled it.

verl updates an SGLang server's weights without a version and counts versions in its own actor, so over HTTP such a
server always reports "default". This module knows the version anyway: verl updates its servers at the end of a step,
and hands out prompts with the step's number after that. A server that reports a number itself is left alone, such as
those of `examples/train_arithmetic/verl_cpu`.

Invariant: no token carries a newer version than the weights that sampled it. Between a weight update and the next
batch it may carry the previous version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

import aiohttp

log = logging.getLogger(__name__)

UNKNOWN = "unknown"
"""The label of a server whose weights may change without notice. Its tokens have no version."""
_TIMEOUT = aiohttp.ClientTimeout(total=10)


class VersionLabels:
    """The versions that this process has set on servers; none if `exact`, because the servers know their version."""

    def __init__(self, exact: bool = False) -> None:
        self._exact = exact
        self._writable: dict[str, bool] = {}  # by URL; False if the server reports a number itself
        self._labels: dict[str, str] = {}  # by URL: the label that was set last

    async def set_version(self, urls: Collection[str], version: int) -> set[str]:
        """Set the version that each server reports. Return the servers that report no other number.

        If a server refuses, a warning is logged. If it still has a number that was set before, that number is now
        wrong.
        """
        await self._set_all(urls, str(version))
        return {url for url in urls if self._labels.get(url, UNKNOWN) in (str(version), UNKNOWN)}

    async def clear(self, urls: Collection[str]) -> None:
        """Set servers that leave to an unknown version.

        They return with other weights, and may serve calls before a batch says which version these have.
        """
        await self._set_all([url for url in urls if url in self._labels], UNKNOWN)

    async def _set_all(self, urls: Collection[str], label: str) -> None:
        if self._exact:
            return
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as http:
            await asyncio.gather(*(self._set(http, url, label) for url in urls))

    async def _set(self, http: aiohttp.ClientSession, url: str, label: str) -> None:
        if self._labels.get(url) == label or self._writable.get(url) is False:
            return
        try:
            if url not in self._writable:
                async with http.get(f"{url}/model_info", raise_for_status=True) as reply:
                    reported = str((await reply.json(content_type=None)).get("weight_version"))
                self._writable[url] = not reported.isdecimal()
            if self._writable[url]:
                body = {"new_version": label, "abort_all_requests": False}
                async with http.post(f"{url}/update_weight_version", json=body, raise_for_status=True):
                    self._labels[url] = label
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            consequence = (
                f"it gets no calls, because it still reports {self._labels[url]}"
                if url in self._labels
                else "its tokens count as sampled by the version of their batch"
            )
            log.warning(
                "setting weight version %s on server %s failed, so %s: %s",
                label,
                url,
                consequence,
                str(error) or type(error).__name__,
            )
