"""A presigned URL permits one write under one key."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.exceptions import CredentialRetrievalError

from agent_wrapper.contract import artifacts_key, failure_marker_key, result_key
from rollout_backend.base.aws.clients import Credentials
from rollout_backend.config import AwsConfig, StorageConfig
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.errors import ConfigError, NoCredentials, PreflightError
from rollout_backend.run.collect.presign import Presigner
from rollouts import make_claims


@pytest.fixture
def claims(run_id) -> SessionClaims:
    return make_claims(run_id=run_id, step=3, rollout_id="task.0", attempt=2, expires_at=1000.0)


@pytest.fixture
async def presigner(local_aws, where) -> AsyncIterator[Presigner]:
    storage = StorageConfig(bucket=local_aws.bucket, prefix="team/")
    async with aclosing(Presigner(storage, where, wall=lambda: 400.0)) as presigner:
        yield presigner


def signature(url: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}


async def test_a_url_is_signed_for_its_key_headers_and_expiry(presigner, claims, local_aws):
    urls = await presigner.urls(claims)
    place = ("team/", claims.run_id, 3, "task.0")
    for url, key in (
        (urls.result, result_key(*place)),
        (urls.failure_marker, failure_marker_key(*place, 2)),
        (urls.artifacts, artifacts_key(*place, 2)),
    ):
        assert urlsplit(url).path == f"/{local_aws.bucket}/{key}"
        signed = signature(url)
        assert signed["X-Amz-Algorithm"] == "AWS4-HMAC-SHA256"
        assert signed["X-Amz-SignedHeaders"] == "content-type;host;if-none-match"
        assert signed["X-Amz-Expires"] == "600"
    assert signature(urls.result)["X-Amz-Signature"] != signature(urls.failure_marker)["X-Amz-Signature"]
    assert "X-Amz-Signature" not in repr(urls)


async def test_on_aws_the_bucket_is_in_the_host_name(local_aws, claims):
    async with aclosing(
        Presigner(StorageConfig(bucket="some-bucket"), AwsConfig(region="eu-central-1"))
    ) as presigner:
        urls = await presigner.urls(claims)
    assert urls.result.startswith("https://some-bucket.s3.")
    assert "eu-central-1" in signature(urls.result)["X-Amz-Credential"]


def test_urls_that_would_outlive_s3s_limit_are_refused_at_start(tmp_path):
    from rollout_backend.config import RolloutConfig

    settings = {
        "model": {"path": tmp_path},
        "storage": {"bucket": "bucket", "presigned": True},
        "runtime": {"kind": "http", "url": "http://agents"},
    }
    assert not RolloutConfig.parse(settings).uses_queue
    assert RolloutConfig.parse({**settings, "queue": {"url": "https://sqs/q"}}).uses_queue
    with pytest.raises(ConfigError, match=r"timeouts\.session_key_s is 604801"):
        RolloutConfig.parse({**settings, "timeouts": {"session_key_s": 604801}})


def signer(url: str) -> str:
    return signature(url)["X-Amz-Credential"].partition("/")[0]


async def test_credentials_that_come_late_are_found(presigner, claims, provider):
    for _ in range(2):
        with pytest.raises(NoCredentials, match="could not be signed"):
            await presigner.urls(claims)
    provider.returns(lasting_s=3600)
    assert signer((await presigner.urls(claims)).result) == "RUN3"


async def test_usable_credentials_sign_while_they_cannot_be_renewed(presigner, claims, provider):
    provider.returns(lasting_s=700)
    assert signer((await presigner.urls(claims)).result) == "RUN1"
    provider.answer.unlink()
    assert signer((await presigner.urls(claims)).result) == "RUN1"


@pytest.mark.parametrize("storage", ["moto"], indirect=True)  # MiniStack knows no temporary keys
async def test_urls_that_outlive_their_credentials_are_reported(presigner, claims, provider, caplog):
    provider.returns(lasting_s=300)
    await presigner.urls(claims)  # for 600 s
    assert caplog.text.count("results written later are lost") == 1
    assert "results written later are lost" in await presigner.check(600)
    assert await presigner.check(100) == ""


async def test_credentials_that_end_before_a_url_are_renewed_first(provider):
    credentials = Credentials(pause_s=0)
    provider.returns(lasting_s=1000)
    assert (await credentials.get_frozen_credentials()).access_key == "RUN1"
    provider.returns(lasting_s=7200)
    assert (await credentials.get_frozen_credentials(lasting_s=900)).access_key == "RUN1"
    assert (await credentials.get_frozen_credentials(lasting_s=3600)).access_key == "RUN2"


async def test_calls_share_one_renewal_and_its_failure(provider):
    credentials = Credentials()
    calls = [credentials.get_frozen_credentials() for _ in range(20)]
    assert {type(error) for error in await asyncio.gather(*calls, return_exceptions=True)} == {
        CredentialRetrievalError
    }
    assert provider.runs.read_text() == "\n"


async def test_a_refused_write_names_the_code_of_s3(local_aws, where):
    async with aclosing(Presigner(StorageConfig(bucket="no-such-bucket"), where)) as presigner:
        with pytest.raises(PreflightError, match=r"answered 404 \(NoSuchBucket: The specified bucket does not exist"):
            await presigner.check(600)


async def test_the_check_passes_the_proxy_that_the_environment_names(local_aws, where, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name)
    elsewhere = where.model_copy(update={"endpoint_url": "http://s3.example.com", "s3_endpoint_url": None})
    async with aclosing(Presigner(StorageConfig(bucket=local_aws.bucket), elsewhere)) as presigner:
        with pytest.raises(PreflightError, match=r"127\.0\.0\.1:9"):
            await presigner.check(600)
