"""The gateway serves HTTPS itself, with the certificate of a private CA."""

from pathlib import Path

import openai
import pytest
import trustme

from agent_wrapper.contract import ModelEndpoint
from agent_wrapper.shared.trajectory import fetch_trajectory
from builders import complete, issue, run_config
from rollout_backend.errors import StartupError
from rollout_backend.model.serving.gateway_fleet import GatewayFleet
from rollout_backend.workbench.local.scripted import ScriptedEngine


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def certificate(ca, tmp_path) -> tuple[Path, Path]:
    chain, key = issue(ca, tmp_path, "localhost")  # not the address that the backend uses
    chain.write_bytes(b"friendlyName: Schl\xfcssel\n" + chain.read_bytes())  # as openssl pkcs12 writes it
    return chain, key


def tls(certificate: Path, key: Path) -> dict:
    return {"gateway": {"tls_certificate": certificate, "tls_key": key}}


async def test_a_rollout_over_https(certificate, ca, start_fleet, tmp_path, monkeypatch, claims):
    with ScriptedEngine(["sealed"]) as engine:
        fleet = await start_fleet(engine, **tls(*certificate))
        [url] = fleet.urls
        assert url.startswith("https://127.0.0.1:")
        fields = fleet.endpoint(claims()).model_dump()
        endpoint = ModelEndpoint(**{name: value.replace("127.0.0.1", "localhost") for name, value in fields.items()})
        with pytest.raises(openai.APIConnectionError) as refused:
            await complete(endpoint)
        assert "CERTIFICATE_VERIFY_FAILED" in str(refused.value.__cause__)
        root = tmp_path / "root.pem"
        ca.cert_pem.write_to_path(root)
        monkeypatch.setenv("SSL_CERT_FILE", str(root))  # as an agent's image would have it
        assert await complete(endpoint) == "sealed"
        assert len((await fetch_trajectory(endpoint, 120)).segments) == 1
        assert (await fleet.stats()).calls == 1
        await fleet.revoke(["s"])
    assert "Traceback" not in (tmp_path / "gateway.log").read_text()


@pytest.mark.slow
async def test_another_server_at_the_gateways_port_is_not_trusted(certificate, start_fleet, tmp_path):
    """The backend trusts the gateway's own certificate, not any that a CA has signed."""
    other = tmp_path / "other"
    other.mkdir()
    with ScriptedEngine(["no"]) as engine:
        real = await start_fleet(engine, tmp_path / "a", **tls(*certificate))
        fake = await start_fleet(engine, tmp_path / "b", **tls(*issue(trustme.CA(), other, "127.0.0.1")))
        [shard] = real._shards
        shard.url = fake.urls[0]
        assert not await shard._healthy()


@pytest.mark.parametrize("broken", ["missing", "nonsense", "of another certificate"])
async def test_unusable_certificate_files_are_reported_at_start(certificate, tmp_path, broken):
    chain, key = certificate
    match broken:
        case "missing":
            key.unlink()
        case "nonsense":
            key.write_text("-----BEGIN PRIVATE KEY-----\n")
        case _:
            trustme.CA().issue_cert("x").private_key_pem.write_to_path(key)
    fleet = GatewayFleet(run_config(**tls(chain, key)), "http://127.0.0.1:9", tmp_path, journals=tmp_path / "j")
    with pytest.raises(StartupError, match=r"gateway\.tls_certificate=.*gateway\.tls_key="):
        await fleet.start()
