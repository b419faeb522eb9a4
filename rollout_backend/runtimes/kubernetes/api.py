"""Call the API server of a cluster, with JSON requests and watches.

Invariants:

- A call is sent once. Only a 401 is retried, with a new token, because a refused call has no effect.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from rollout_backend.config import KubernetesConfig
from rollout_backend.runtimes.kubernetes.cluster import Cluster, load_cluster

_MAX_RETRY_AFTER_S = 60.0
_WATCH_S = 60  # seconds until the server ends a watch; a silently dropped connection is noticed soon after


class ApiError(Exception):
    """The API server refused a call."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


class KubernetesApi:
    """Calls to one namespace."""

    def __init__(self, cluster: Cluster, namespace: str, http: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self._http = http

    @classmethod
    async def open(cls, config: KubernetesConfig) -> KubernetesApi:
        """Open the API of the configured cluster. Raises PreflightError."""
        cluster = await asyncio.to_thread(load_cluster, config.kubeconfig, config.context)
        timeout = aiohttp.ClientTimeout(sock_connect=config.connect_timeout_s, total=config.read_timeout_s)
        connector = aiohttp.TCPConnector(limit=64, ssl=cluster.ssl or True)
        return cls(cluster, config.namespace, aiohttp.ClientSession(timeout=timeout, connector=connector))

    def path(self, resource: str, name: str = "") -> str:
        """Return the path of a namespaced resource, or of an object in it."""
        group = "/apis/batch/v1" if resource == "jobs" else "/api/v1"
        path = f"{group}/namespaces/{self.namespace}/{resource}"
        return f"{path}/{name}" if name else path

    async def call(self, method: str, path: str, body: object = None, **query: str) -> dict[str, Any]:
        """Send a request and return the object in the response.

        Raises:
            ApiError: the server refused the request.
            NoCredentials: the request was not sent. aiohttp.ClientError, TimeoutError: no complete response arrived.
        """
        async with self._request(method, path, query, json=body) as reply:
            answer: dict[str, Any] = await reply.json(content_type=None)
            return answer

    @asynccontextmanager
    async def watch(self, path: str, **query: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Open a watch, which yields events until the server ends it. Raises like `call`."""
        query |= {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(_WATCH_S)}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=_WATCH_S + 15)
        async with self._request("GET", path, query, timeout=timeout) as reply:
            yield _events(reply)

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, query: Mapping[str, str], **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        credentials, url = self.cluster.credentials, f"{self.cluster.url}{path}"
        token = await credentials.token()
        for last in (False, True):
            headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
            async with self._http.request(method, url, params=query, headers=headers, **more) as reply:
                if reply.status == 401 and not last:
                    refused, token = token, await credentials.token(refused=token)
                    if token != refused:
                        continue
                if reply.status >= 400:
                    raise await _error(reply)
                yield reply
                return

    async def aclose(self) -> None:
        await self._http.close()


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    rest = b""  # aiohttp limits the length of lines that it reads; a pod may be longer
    async for chunk in reply.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            event: dict[str, Any] = json.loads(line)
            if event["type"] == "ERROR":
                status = event["object"]
                raise ApiError(status.get("code", 500), status.get("reason", ""), status.get("message", ""))
            yield event


async def _error(reply: aiohttp.ClientResponse) -> ApiError:
    text = (await reply.content.read(4000)).decode(errors="replace")
    try:
        status = json.loads(text)
        reason, message = str(status["reason"]), str(status["message"])
    except (ValueError, KeyError, TypeError):  # from a proxy in front of the server
        reason, message = str(reply.reason), text[:500]
    return ApiError(reply.status, reason, message, _retry_after_s(reply.headers.get("Retry-After", "")))


def _retry_after_s(value: str) -> float:
    """Parse a Retry-After header into seconds. The API server sends a number; a proxy may send a date."""
    return min(float(value), _MAX_RETRY_AFTER_S) if value.isdecimal() else 0.0
