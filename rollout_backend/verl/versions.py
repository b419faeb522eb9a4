"""Tells verl's servers which weights they serve, where verl does not, so that each token bears its version.

verl hands an SGLang server its weights without a version, and counts them in an actor of its own; over HTTP such a
server says "default" for ever. The version is known here all the same: verl gives its servers new weights at the end
of a step, and hands out prompts, with the step's number, after that. A server that says a number by itself is left
alone, as those of `rollout_backend.local.verl_cpu`.

What must always hold: no token bears a newer version than the weights that sampled it. In the moment between new
weights and the next batch it may bear the one before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import aiohttp

log = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=10)


class VersionLabels:
    def __init__(self) -> None:
        self._ours: dict[str, bool] = {}  # by the server's URL: whether it is for us to say
        self._said: dict[str, int] = {}

    async def say(self, urls: Iterable[str], version: int) -> None:
        """Has each server say that it serves `version`. One that refuses is warned of; its tokens have no version."""
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as http:
            await asyncio.gather(*(self._say(http, url, version) for url in urls))

    async def _say(self, http: aiohttp.ClientSession, url: str, version: int) -> None:
        if self._said.get(url) == version or self._ours.get(url) is False:
            return
        try:
            if url not in self._ours:
                async with http.get(f"{url}/model_info", raise_for_status=True) as reply:
                    said = str((await reply.json(content_type=None)).get("weight_version"))
                self._ours[url] = not said.isdecimal()
            if self._ours[url]:
                body = {"new_version": str(version), "abort_all_requests": False}
                async with http.post(f"{url}/update_weight_version", json=body, raise_for_status=True):
                    self._said[url] = version
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            log.warning(
                "the server %s could not be told that it serves version %d, and its tokens count as sampled by the "
                "version of their batch: %s",
                url,
                version,
                error or type(error).__name__,
            )
