"""Find the cluster and its credentials: from a kubeconfig, or as a pod's service account.

Invariants:

- No expired token is used: token files are read for each call, because the kubelet replaces them, and an exec plugin
  runs again before its token expires.
- An unsupported entry of a kubeconfig is refused by name.
"""

import asyncio
import base64
import binascii
import json
import os
import ssl
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import yaml

from rollout_backend.child_process import run_child
from rollout_backend.errors import NoCredentials, PreflightError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REFUSED_OF_CLUSTER = ("proxy-url", "tls-server-name")
_REFUSED_OF_USER = ("username", "password", "auth-provider", "as", "as-uid", "as-groups", "as-user-extra")
_EXEC_S = 60.0
_RENEW_BEFORE_S = 60.0


class Credentials(Protocol):
    """How calls are authenticated."""

    async def token(self, refused: str | None = None) -> str | None:
        """Return the bearer token; None if a client certificate authenticates. `refused` is a token that got a 401.

        Raises:
            NoCredentials: no token is available.
        """
        ...


@dataclass(frozen=True)
class FixedCredentials:
    """A token in the kubeconfig, or a client certificate."""

    value: str | None = None

    async def token(self, refused: str | None = None) -> str | None:
        return self.value


@dataclass(frozen=True)
class TokenFile:
    """A token in a file that another process replaces."""

    path: Path

    async def token(self, refused: str | None = None) -> str | None:
        try:
            return self.path.read_text().strip()
        except OSError as error:
            raise NoCredentials(f"the token file {self.path} cannot be read: {error}") from error


class ExecPlugin:
    """A command that prints a token, such as `aws eks get-token`."""

    def __init__(self, spec: Mapping[str, Any], folder: Path) -> None:
        command = str(spec["command"])
        self._argv = [str(folder / command) if "/" in command else command, *map(str, spec.get("args") or ())]
        info = {"apiVersion": spec["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": False}}
        self._env = {each["name"]: each["value"] for each in spec.get("env") or ()}
        self._env["KUBERNETES_EXEC_INFO"] = json.dumps(info)
        self._token: str | None = None
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
    ssl: ssl.SSLContext | None  # None: plain HTTP
    credentials: Credentials


def load_cluster(kubeconfig: Path | None, context: str | None) -> Cluster:
    """Load the cluster. By default, use this pod's service account, or else $KUBECONFIG or ~/.kube/config.

    Raises:
        PreflightError: no configuration was found, or it has an unsupported entry.
    """
    in_cluster = os.environ.get("KUBERNETES_SERVICE_HOST")
    if kubeconfig is None and context is None and in_cluster and (SERVICE_ACCOUNT / "token").exists():
        host = f"[{in_cluster}]" if ":" in in_cluster else in_cluster
        url = f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
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
        with tempfile.TemporaryDirectory() as holder:  # ssl reads certificates only from files
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


def _credentials(user: Mapping[str, Any], folder: Path) -> Credentials:
    if spec := user.get("exec"):
        return ExecPlugin(spec, folder)
    if file := user.get("tokenFile"):
        return TokenFile(folder / file)
    return FixedCredentials(user.get("token"))
