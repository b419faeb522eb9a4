"""The relay serves HTTPS, and the dialer verifies its certificate."""

import json
import os
import ssl
import sys
from contextlib import AsyncExitStack

import aiohttp
import trustme

from builders import eventually, issue
from rollout_backend.model.relay.cli import KEY_ENV
from rollout_backend.model.serving.server_process import ServerProcess, free_port


async def test_calls_over_tls(key, tmp_path, upstream):
    ca, issuer = trustme.CA(), tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(issuer)
    certificate, private = issue(ca, tmp_path, "localhost")
    port = free_port()
    url = f"https://localhost:{port}"
    async with AsyncExitStack() as stack:

        async def start(name: str, argv: list[str], settings: dict | None = None, **env: str) -> ServerProcess:
            argv = [sys.executable, "-m", *argv]
            given = json.dumps(settings).encode()
            process = ServerProcess(name, argv, tmp_path / f"{name}.log", {**os.environ, **env}, given)
            stack.push_async_callback(process.stop)
            await process.start()
            return process

        files = ["--tls-certificate", str(certificate), "--tls-key", str(private)]
        await start("relay", ["rollout_backend.model.relay", "--port", str(port), *files], **{KEY_ENV: key})
        dialer = ["rollout_backend.model.relay.dialer"]
        settings = {"key": key, "url": f"wss://localhost:{port}", "gateways": {"": upstream.url}}
        stranger = await start("stranger", dialer, settings)  # does not know the CA of this relay
        await eventually(lambda: "CERTIFICATE_VERIFY_FAILED" in stranger.log.read_text())
        context = ssl.create_default_context(cafile=str(issuer))
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)))

        async def dialled() -> bool:
            async with http.get(f"{url}/health") as answer:
                return (await answer.json())["dialer"] is not None

        assert not await dialled()
        await start("dialer", dialer, settings, SSL_CERT_FILE=str(issuer))
        await eventually(dialled)
        async with http.get(f"{url}/v1/models") as answer:
            assert (await answer.json())["path"] == "/v1/models"
