"""Track verl's servers as they join, leave and get new weights, and decide which of them get model calls.

With `separate_async`, verl lends the trainer's GPUs to generation between steps: it adds servers to its load balancer
before they have their weights, and removes them before it takes their memory.

Invariants:

- A server that has left stops getting calls within a fraction of a second.
- A server that has joined gets calls from the next batch on, once it reports its weight version: verl announces the
  version of its servers' weights only with a batch, and the servers have the weights by then.
- A server that reports a wrong weight version gets no calls until the version can be corrected.
- If verl does not answer, the list of servers stays unchanged.
- No token carries a newer version than the weights that sampled it. Between a weight update and the next batch it may
  carry the previous version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import aiohttp
import ray

from rollout_backend.verl import verl_api
from rollout_backend.verl.vllm_middleware import attach

log = logging.getLogger(__name__)

UNKNOWN = "unknown"
"""The label of a server whose weights may change without notice. Its tokens have no version."""
_TIMEOUT = aiohttp.ClientTimeout(total=10)


class VersionLabels:
    """The weight versions that this process has set on servers, so that each token carries the one that sampled it.

    verl updates an SGLang server's weights without a version and counts versions in its own actor, so over HTTP such
    a server always reports "default". This process knows the version anyway: verl updates its servers at the end of a
    step, and hands out prompts with the step's number after that. A server that reports a number itself is left
    alone, such as those of `examples/train_arithmetic/verl_cpu`; if they are `labelled`, all do.
    """

    def __init__(self, labelled: bool) -> None:
        self._labelled = labelled
        # By URL; False if the server reports a number itself.
        self._writable: dict[str, bool] = {}
        # The label that was set last, by URL.
        self._labels: dict[str, str] = {}

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
        if self._labelled:
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


class ServerList:
    """`list_servers` asks verl for its servers' URLs; `follow` sends model calls to the given servers only."""

    def __init__(
        self,
        urls: Sequence[str],
        list_servers: Callable[[], Awaitable[Sequence[str]]],
        follow: Callable[[Sequence[str]], Awaitable[None]],
        labelled: bool = False,
    ) -> None:
        """`labelled`: all servers report the version of their weights themselves."""
        self._serving = list(urls)
        self._list_servers = list_servers
        self._follow = follow
        self._labels = VersionLabels(labelled)
        # Servers that report a wrong weight version.
        self._mislabelled: list[str] = []
        self._version = 0
        self._changing = asyncio.Lock()

    async def begin_batch(self, version: int) -> None:
        """Send a batch's calls to all servers that verl has now. Their weights have this version."""
        async with self._changing:
            self._version = version
            await self._serve_with(await self._ask())

    async def refresh(self) -> None:
        """Drop the servers that have left, and add those whose version could not be set before."""
        async with self._changing:
            urls = await self._ask()
            known = [url for url in (*self._serving, *self._mislabelled) if url in urls]
            if known != self._serving:
                await self._serve_with(known)

    async def _serve_with(self, urls: Sequence[str]) -> None:
        left = [url for url in self._serving if url not in urls]
        if left:
            # Drop them first, because another server may answer slowly.
            await self._follow([url for url in self._serving if url in urls])
        labelled = await self._labels.set_version(urls, self._version)
        self._serving = [url for url in urls if url in labelled]
        self._mislabelled = [url for url in urls if url not in labelled]
        await self._follow(self._serving)
        await self._labels.clear(left)

    async def _ask(self) -> Sequence[str]:
        try:
            return await self._list_servers()
        except Exception as error:
            # Ray can raise any exception.
            log.warning("asking verl for its servers failed; their list stays unchanged: %s", error)
            return [*self._serving, *self._mislabelled]


class VllmServers:
    """`load_balancer` is verl's actor, which has the servers' actors by HOST:PORT."""

    def __init__(self, load_balancer: Any) -> None:
        self._load_balancer = load_balancer
        self._attached: set[str] = set()

    def addresses(self) -> list[str]:
        """Return the servers as HOST:PORT. Those that joined since the last call report versions from now on. Blocks.

        Raises:
            RayError: the load balancer or a server does not answer.
        """
        listed = verl_api.server_addresses(self._load_balancer)
        self._attached &= set(listed)
        if joined := set(listed) - self._attached:
            actors = verl_api.server_actors(self._load_balancer)
            joining = [actors[address].__ray_call__.remote(attach) for address in joined]
            ray.get(joining, timeout=verl_api.ANSWER_S)
            self._attached |= joined
        return listed
