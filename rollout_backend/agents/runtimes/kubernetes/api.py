"""Find the cluster and its credentials, from a kubeconfig or as a pod's service account, and call its API server
with JSON requests and watches.

Invariants:

- No expired token is used: token files are read for each call, because the kubelet replaces them, and an exec plugin
  runs again before its token expires.
- An unsupported entry of a kubeconfig is refused by name.
- An answer that is not in the API server's format comes from a proxy, and counts as no answer.
- A call is sent once. Only a 401 is retried, with a new token, because a refused call has no effect.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import os
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

import aiohttp
import yaml

from agent_wrapper.shared.own_answers import KUBERNETES, own_answer
from rollout_backend.base import aws
from rollout_backend.base.addresses import host_port
from rollout_backend.base.child_process import run_child
from rollout_backend.config import KubernetesConfig
from rollout_backend.errors import NoCredentials, PreflightError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REFUSED_OF_CLUSTER = ("proxy-url", "tls-server-name")
_REFUSED_OF_USER = ("username", "password", "auth-provider", "as", "as-uid", "as-groups", "as-user-extra")
_EXEC_S = 60.0
_RENEW_BEFORE_S = 60.0
_MAX_RETRY_AFTER_S = 60.0
_MAX_ERROR_BYTES = 64_000
# The server ends a watch after `_WATCH_S`. If it is still open `_LATE_S` later, the connection is dead or a proxy
# keeps it open.
_WATCH_S, _LATE_S = 60, 15


class ClusterCredentials:
    """Credentials of calls: a token in the kubeconfig, or a client certificate."""

    def __init__(self, fixed: str | None) -> None:
        self._token = fixed

    async def token(self, refused: str | None = None) -> str | None:
        """Return the bearer token; None if a client certificate authenticates. `refused` is a token that got a 401.

        Raises:
            NoCredentials: no token is available.
        """
        return self._token


class TokenFile(ClusterCredentials):
    """A token in a file that another process replaces."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def token(self, refused: str | None = None) -> str | None:
        try:
            return self._path.read_text().strip()
        except OSError as error:
            raise NoCredentials(f"the token file {self._path} cannot be read: {error}") from error


class ExecPlugin(ClusterCredentials):
    """A command that prints a token, such as `aws eks get-token`."""

    def __init__(self, spec: Mapping[str, Any], folder: Path) -> None:
        command = str(spec["command"])
        self._argv = [str(folder / command) if "/" in command else command, *map(str, spec.get("args") or ())]
        info = {"apiVersion": spec["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": False}}
        self._env = {each["name"]: each["value"] for each in spec.get("env") or ()}
        self._env["KUBERNETES_EXEC_INFO"] = json.dumps(info)
        super().__init__(None)
        self._expires_at = 0.0
        self._running = asyncio.Lock()

    async def token(self, refused: str | None = None) -> str | None:
        async with self._running:
            if self._token is None or self._token == refused or time.time() > self._expires_at - _RENEW_BEFORE_S:
                await self._run()
            return self._token

    async def _run(self) -> None:
        try:
            done = await run_child(self._argv, _EXEC_S, {**os.environ, **self._env})
        except TimeoutError:
            raise NoCredentials(f"{self._argv[0]} printed no credentials within {_EXEC_S:g} s") from None
        except OSError as error:
            raise NoCredentials(f"the kubeconfig's command {self._argv[0]} cannot be run: {error}") from error
        try:
            status = json.loads(done.stdout)["status"]
            self._token = status["token"]
            expires = status.get("expirationTimestamp")
        except (ValueError, KeyError, TypeError):
            said = done.stderr.decode(errors="replace").strip()[-500:] or "nothing"
            raise NoCredentials(
                f"{self._argv[0]} exited with code {done.returncode} and printed no token; it wrote: {said}"
            ) from None
        self._expires_at = datetime.fromisoformat(expires).timestamp() if expires else float("inf")


@dataclass(frozen=True)
class Cluster:
    """An API server and how to call it."""

    url: str
    ssl: ssl.SSLContext | None
    """None for plain HTTP."""
    credentials: ClusterCredentials


def load_cluster(kubeconfig: Path | None, context: str | None) -> Cluster:
    """Load the cluster. By default, use this pod's service account, or else $KUBECONFIG or ~/.kube/config.

    Raises:
        PreflightError: no configuration was found, or it has an unsupported entry.
    """
    in_cluster = os.environ.get("KUBERNETES_SERVICE_HOST")
    if kubeconfig is None and context is None and in_cluster and (SERVICE_ACCOUNT / "token").exists():
        url = f"https://{host_port(in_cluster, os.environ.get('KUBERNETES_SERVICE_PORT', '443'))}"
        verify = ssl.create_default_context(cafile=str(SERVICE_ACCOUNT / "ca.crt"))
        return Cluster(url, verify, TokenFile(SERVICE_ACCOUNT / "token"))
    path = kubeconfig or _default_kubeconfig()
    try:
        tree = yaml.safe_load(path.read_text())
        return _read(tree, path.parent, context)
    except (OSError, yaml.YAMLError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise PreflightError(
            f"the kubeconfig {path} cannot be used ({type(error).__name__}: {error}): set runtime.kubeconfig and "
            "runtime.context, or $KUBECONFIG"
        ) from error


def _default_kubeconfig() -> Path:
    named = os.environ.get("KUBECONFIG", "")
    if os.pathsep in named:
        raise PreflightError(
            f"$KUBECONFIG names several files ({named}), which are not merged: set runtime.kubeconfig to one of them"
        )
    return Path(named or "~/.kube/config").expanduser()


def _read(tree: Mapping[str, Any], folder: Path, context: str | None) -> Cluster:
    name = context or tree.get("current-context")
    if not name:
        raise LookupError("it has no current-context")
    chosen = _named(tree, "contexts", name)["context"]
    cluster = _named(tree, "clusters", chosen["cluster"])["cluster"]
    user = _named(tree, "users", chosen["user"])["user"] or {}
    for entry, refused in ((cluster, _REFUSED_OF_CLUSTER), (user, _REFUSED_OF_USER)):
        for key in refused:
            if entry.get(key):
                raise ValueError(f"{key} is not supported")
    url = str(cluster["server"]).rstrip("/")
    verify = _ssl_context(cluster, user, folder) if url.startswith("https:") else None
    return Cluster(url, verify, _credentials(user, folder))


def _named(tree: Mapping[str, Any], kind: str, name: str) -> Mapping[str, Any]:
    for entry in tree.get(kind) or ():
        if entry["name"] == name:
            found: Mapping[str, Any] = entry
            return found
    raise LookupError(f"it has no {kind[:-1]} {name!r}")


def _ssl_context(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> ssl.SSLContext:
    authority = _content(cluster, "certificate-authority", folder)
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    certificate, key = _content(user, "client-certificate", folder), _content(user, "client-key", folder)
    if certificate and key:
        # `ssl` reads certificates only from files.
        with tempfile.TemporaryDirectory() as holder:
            path = Path(holder, "client.pem")
            path.touch(mode=0o600)
            path.write_bytes(certificate + b"\n" + key)
            context.load_cert_chain(path)
    return context


def _content(entry: Mapping[str, Any], name: str, folder: Path) -> bytes | None:
    """Return an entry of a kubeconfig, given inline as NAME-data or in the file NAME."""
    if data := entry.get(f"{name}-data"):
        try:
            return base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise ValueError(f"{name}-data is not base64: {error}") from error
    return (folder / entry[name]).read_bytes() if entry.get(name) else None


def _credentials(user: Mapping[str, Any], folder: Path) -> ClusterCredentials:
    if spec := user.get("exec"):
        return ExecPlugin(spec, folder)
    if file := user.get("tokenFile"):
        return TokenFile(folder / file)
    return ClusterCredentials(user.get("token"))


def proxy_of(url: str) -> str | None:
    """Return the environment's proxy for an API server, as kubectl finds it: none on this machine, and NO_PROXY may
    hold networks."""
    parts, named = urlsplit(url), getproxies_environment()
    proxy = named.get(parts.scheme)
    if not proxy or parts.hostname == "localhost" or proxy_bypass(parts.netloc):
        return None
    for each in ["127.0.0.0/8", "::1", *named.get("no", "").split(",")]:
        with contextlib.suppress(ValueError):
            # The entry is a name instead of an address.
            if ip_address(parts.hostname or "") in ip_network(each.strip().strip("[]"), strict=False):
                return None
    return proxy if "://" in proxy else f"http://{proxy}"


class ClusterError(Exception):
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
        http = aiohttp.ClientSession(
            timeout=timeout,
            connector=connector,
            proxy=proxy_of(cluster.url),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return cls(cluster, config.namespace, http)

    def path(self, resource: str, name: str = "") -> str:
        """Return the path of a namespaced resource, or of an object in it."""
        group = "/apis/batch/v1" if resource == "jobs" else "/api/v1"
        path = f"{group}/namespaces/{self.namespace}/{resource}"
        return f"{path}/{name}" if name else path

    async def call(self, method: str, path: str, body: object = None, **query: str) -> dict[str, Any]:
        """Send a request and return the object in the response.

        Raises:
            ClusterError: the server refused the request.
            NoCredentials: the request was not sent. aiohttp.ClientError, TimeoutError: no complete response arrived.
        """
        async with self._request(method, path, query, json=body) as reply:
            answer = await reply.json(content_type=None)
            if not isinstance(answer, dict) or answer.keys().isdisjoint(("kind", "gitVersion")):
                raise aiohttp.ClientPayloadError(f"the answer to {method} {path} is no object of Kubernetes")
            return answer

    @asynccontextmanager
    async def watch(self, path: str, **query: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Open a watch, which yields events until the server ends it. Raises like `call`."""
        query |= {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(_WATCH_S)}
        timeout = aiohttp.ClientTimeout(total=_WATCH_S + _LATE_S, sock_connect=10.0)
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
            async with self._http.request(
                method, url, params=query, headers=headers, allow_redirects=False, **more
            ) as reply:
                if reply.status == 401 and not last:
                    refused, token = token, await credentials.token(refused=token)
                    if token != refused:
                        continue
                if reply.status >= 300:
                    raise await _error(reply)
                yield reply
                return

    async def aclose(self) -> None:
        await self._http.close()


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    # aiohttp limits the length of lines that it reads, and a pod may be longer.
    rest = b""
    async for chunk in reply.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            event: dict[str, Any] = json.loads(line)
            if event["type"] == "ERROR":
                status = event["object"]
                raise ClusterError(status.get("code", 500), status.get("reason", ""), status.get("message", ""))
            yield event


async def _error(reply: aiohttp.ClientResponse) -> ClusterError | aiohttp.ClientError:
    text = (await aws.read_up_to(reply, _MAX_ERROR_BYTES)).decode(errors="replace")
    status = own_answer(text, KUBERNETES)
    if status is None and reply.status < 500 and reply.status not in (401, 408, 429):
        return aiohttp.ClientPayloadError(
            f"{reply.status} is not from the API server, but from a proxy in front of it: {text[:500]}"
        )
    reason = reply.reason if status is None else status.get("reason") or ""
    message = text[:500] if status is None else status.get("message") or ""
    # The API server sends a number; a proxy may send a date.
    after = reply.headers.get("Retry-After", "")
    retry_after_s = min(float(after), _MAX_RETRY_AFTER_S) if after.isdecimal() else 0.0
    return ClusterError(reply.status, str(reason), str(message), retry_after_s)
