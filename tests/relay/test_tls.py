"""The relay serves HTTPS, and the dialer verifies its certificate."""

import json
import os
import ssl
import sys

import aiohttp
import pytest
import trustme

from rollout_backend.serving.server_process import ServerProcess, free_port


@pytest.fixture
def ca(tmp_path):
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    return ca


@pytest.fixture
async def tls_relay(ca, key, tmp_path):
    certificate, private = tmp_path / "certificate.pem", tmp_path / "key.pem"
    issued = ca.issue_cert("localhost")
    issued.private_key_pem.write_to_path(private)
    for blob in issued.cert_chain_pems:
        blob.write_to_path(certificate, append=True)
    port = free_port()
    argv = ["--port", str(port), "--tls-certificate", str(certificate), "--tls-key", str(private)]
    relay = ServerProcess(
        "the relay",
        [sys.executable, "-m", "rollout_backend.relay", *argv],
        tmp_path / "relay.log",
        {**os.environ, "ROLLOUT__RELAY__KEY": key},
    )
    await relay.start()
    yield f"https://localhost:{port}"
    await relay.stop()


@pytest.fixture
async def dialer(key, tmp_path, upstream):
    """Start the dialer's process; further arguments are its environment."""
    processes = []

    async def start(url: str, **env: str) -> ServerProcess:
        settings = {"key": key, "url": url.replace("http", "ws"), "gateways": {"": upstream.url}}
        argv = [sys.executable, "-m", "rollout_backend.relay.dialer"]
        log = tmp_path / f"dialer-{len(processes)}.log"
        processes.append(ServerProcess("the dialer", argv, log, {**os.environ, **env}, json.dumps(settings).encode()))
        await processes[-1].start()
        return processes[-1]

    yield start
    for process in processes:
        await process.stop()


async def test_calls_over_tls(tls_relay, dialer, ca, tmp_path, until):
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    stranger = await dialer(tls_relay)  # does not know the CA of this relay
    await until(lambda: "CERTIFICATE_VERIFY_FAILED" in stranger.log.read_text())
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as http:

        async def dialled() -> bool:
            async with http.get(f"{tls_relay}/health") as answer:
                return (await answer.json())["dialer"] is not None

        assert not await dialled()
        await dialer(tls_relay, SSL_CERT_FILE=str(tmp_path / "ca.pem"))
        await until(dialled)
        async with http.get(f"{tls_relay}/v1/models") as answer:
            assert (await answer.json())["path"] == "/v1/models"
