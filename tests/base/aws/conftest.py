"""A proxy that plays AWS: it answers every request itself, whatever its host, and records it."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

Answer = tuple[int, dict[str, str], bytes]


@dataclass(frozen=True)
class Sent:
    """One request."""

    method: str
    url: str
    headers: dict[str, str]  # by their names in lower case
    body: bytes


class PlayedAws:
    """An HTTP proxy, for TLS too."""

    def __init__(self, authority: trustme.CA) -> None:
        self.sent: list[Sent] = []
        self.url = ""
        self.answer: Callable[[Sent], Answer] = lambda sent: (200, {}, b"{}")
        self._authority = authority

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        origin = ""
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) != b"":
                first, *lines = head.decode().strip().split("\r\n")
                method, target, _ = first.split()
                if method == "CONNECT":
                    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                    await writer.start_tls(self._identity(target.partition(":")[0]))
                    origin = f"https://{target.removesuffix(':443')}"
                    continue
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.sent.append(Sent(method, origin + target, headers, body))
                status, more, content = self.answer(self.sent[-1])
                more = {"Content-Length": str(len(content)), **more}
                answer = [f"HTTP/1.1 {status} Said", *(f"{name}: {value}" for name, value in more.items()), "", ""]
                writer.write("\r\n".join(answer).encode() + content)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _identity(self, host: str) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._authority.issue_cert(host).configure_cert(context)
        return context


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
async def played_aws(
    authority: trustme.CA, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[PlayedAws]:
    """Send every request of AWS clients to a player."""
    played = PlayedAws(authority)
    server = await asyncio.start_server(played.serve, "127.0.0.1", 0)
    url = played.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name in ("NO_PROXY", "no_proxy", "AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    environment = {
        "HTTP_PROXY": url,
        "HTTPS_PROXY": url,
        "http_proxy": url,
        "https_proxy": url,
        "AWS_CA_BUNDLE": str(tmp_path / "ca.pem"),
        "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield played
    server.close()
