"""Keys of local clouds: each cloud publishes its key, and this user's clients find it by their endpoint.

Every user of a machine can reach its ports, so a local cloud accepts its own key only. The user's real credentials
are never sent to it. It imports only the standard library, for a janitor that waits.
"""

import contextlib
import hmac
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

HOST = "127.0.0.1"
# The key is the secret: signatures are not verified.
SECRET = "local"  # noqa: S105


def proxy_bypass() -> dict[str, str]:
    """Return the environment variables with which clients reach this machine without the user's proxy."""
    # Some clients read one, and some the other.
    names = ("NO_PROXY", "no_proxy")
    hosts = [host.strip() for name in names for host in os.environ.get(name, "").split(",")]
    every = ",".join(dict.fromkeys(filter(None, [*hosts, HOST, "localhost", "::1"])))
    return dict.fromkeys(names, "*" if "*" in hosts else every)


def bypass_proxies() -> None:
    """Set the variables of `proxy_bypass` for this process and those that it starts."""
    os.environ.update(proxy_bypass())


def publish_key(endpoint_url: str, key: str) -> None:
    """Let this user's clients of the endpoint sign with the key."""
    file = _file_of(endpoint_url)
    assert file is not None, "not an endpoint of this machine"
    file.parent.mkdir(0o700, parents=True, exist_ok=True)
    # A cloud that was killed may have left its key.
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as text:
        text.write(key)


def withdraw_key(endpoint_url: str) -> None:
    """Forget the key of an endpoint that ends."""
    if (file := _file_of(endpoint_url)) is not None:
        file.unlink(missing_ok=True)


def key_of(endpoint_url: str | None) -> str | None:
    """Return the key of a local cloud's endpoint; None for any other endpoint."""
    file = _file_of(endpoint_url)
    with contextlib.suppress(OSError):
        return file.read_text() if file is not None else None
    return None


def client_keys(endpoint_url: str | None) -> dict[str, str]:
    """Return the arguments that a boto3 client of this endpoint needs: none, unless it is a local cloud's."""
    key = key_of(endpoint_url)
    return {} if key is None else {"aws_access_key_id": key, "aws_secret_access_key": SECRET}


def names_key(signature: str, key: str) -> bool:
    """Return whether an Authorization header or the query of a presigned URL names this access key."""
    # The query of signature version 2, which boto3 signs URLs with in some regions, has another name for it.
    found = re.search(r"(?:^|[ &])(?:(?:X-Amz-)?Credential|AWSAccessKeyId)=([^/%&,]+)", signature)
    return found is not None and hmac.compare_digest(found[1].encode(), key.encode())


def _file_of(endpoint_url: str | None) -> Path | None:
    url = urlsplit(endpoint_url or "")
    if url.hostname != HOST or not url.port:
        return None
    cache = os.environ.get("ROLLOUT_CACHE") or Path.home() / ".cache" / "rollout-backend"
    return Path(cache) / "local-keys" / str(url.port)
