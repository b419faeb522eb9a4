"""HTTPS by the gateway itself, with a certificate of a CA of one's own."""

from pathlib import Path

import openai
import pytest
import trustme

from agent_wrapper.trajectory import TrajectoryUnavailable, fetch_trajectory
from rollout_backend.config import RolloutConfig
from rollout_backend.errors import StartupError
from rollout_backend.local.scripted import BYTE_MODEL, ScriptedEngine
from rollout_backend.serving.gateway_fleet import GatewayFleet


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def certificate(ca, tmp_path) -> tuple[Path, Path]:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    issued = ca.issue_cert("localhost")  # not the address at which the backend itself reaches it
    issued.private_key_pem.write_to_path(key)
    for blob in issued.cert_chain_pems:
        blob.write_to_path(certificate, append=True)
    return certificate, key


def config(certificate: Path, key: Path, **gateway) -> RolloutConfig:
    return RolloutConfig.parse(
        {
            "model": {"path": BYTE_MODEL, "name": "m"},
            "storage": {"bucket": "bucket"},
            "runtime": {"kind": "http", "url": "http://127.0.0.1:9"},
            "gateway": {"tls_certificate": certificate, "tls_key": key, **gateway},
        }
    )


async def test_a_rollout_over_https(certificate, ca, tmp_path, monkeypatch, claims):
    with ScriptedEngine(["sealed"]) as engine:
        fleet = GatewayFleet(config(*certificate), engine.url, tmp_path)
        await fleet.start()
        try:
            (url,) = fleet.urls
            assert url.startswith("https://127.0.0.1:")
            endpoint = fleet.endpoint(claims())
            endpoint = endpoint.model_validate(
                {name: value.replace("127.0.0.1", "localhost") for name, value in endpoint.model_dump().items()}
            )
            with pytest.raises(TrajectoryUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
                await fetch_trajectory(endpoint, 1)
            root = tmp_path / "root.pem"
            ca.cert_pem.write_to_path(root)
            monkeypatch.setenv("SSL_CERT_FILE", str(root))  # as an agent's image would have it
            async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
                reply = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "Hello"}]
                )
            assert reply.choices[0].message.content == "sealed"
            assert len((await fetch_trajectory(endpoint, 10)).segments) == 1
            assert (await fleet.stats()).calls == 1
            await fleet.revoke(["s"])
        finally:
            await fleet.stop()
    assert "Traceback" not in (tmp_path / "gateway.log").read_text()


async def test_an_impostor_at_its_port_is_not_believed(certificate, tmp_path):
    """The backend trusts the very certificate that it handed out, not any that a CA has signed."""
    with ScriptedEngine(["no"]) as engine:
        real = GatewayFleet(config(*certificate), engine.url, tmp_path / "a")
        await real.start()
        try:
            (shard,) = real._shards
            other = tmp_path / "other"
            other.mkdir()
            issued = trustme.CA().issue_cert("127.0.0.1")
            issued.private_key_pem.write_to_path(other / "key.pem")
            issued.cert_chain_pems[0].write_to_path(other / "certificate.pem")
            fake = GatewayFleet(config(other / "certificate.pem", other / "key.pem"), engine.url, tmp_path / "b")
            await fake.start()
            try:
                shard._url = fake.urls[0]
                assert not await shard._healthy()
            finally:
                await fake.stop()
        finally:
            await real.stop()


@pytest.mark.parametrize("broken", ["missing", "nonsense", "of another certificate"])
async def test_files_that_do_not_fit_are_named_before_anything_starts(certificate, tmp_path, broken):
    chain, key = certificate
    match broken:
        case "missing":
            key.unlink()
        case "nonsense":
            key.write_text("-----BEGIN PRIVATE KEY-----\n")
        case _:
            trustme.CA().issue_cert("x").private_key_pem.write_to_path(key)
    fleet = GatewayFleet(config(chain, key), "http://127.0.0.1:9", tmp_path)
    with pytest.raises(StartupError, match=r"gateway\.tls_certificate=.*gateway\.tls_key="):
        await fleet.start()
