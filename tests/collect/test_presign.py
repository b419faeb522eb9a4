"""A presigned URL permits one write under one key."""

from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from agent_wrapper.contract import PUT_HEADERS, Sampling, failure_marker_key, result_key
from rollout_backend.collect.presign import Presigner
from rollout_backend.config import AwsConfig, StorageConfig
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.errors import ConfigError


@pytest.fixture
def claims(run_id) -> SessionClaims:
    return SessionClaims(
        run_id=run_id,
        step=3,
        rollout_id="task.0",
        attempt=2,
        session_id="session",
        sampling=Sampling(),
        expires_at=1000.0,
    )


@pytest.fixture
def presigner(local_aws, where) -> Presigner:
    return Presigner(StorageConfig(bucket=local_aws.bucket, prefix="team/"), where, wall=lambda: 400.0)


def signature(url: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}


def test_a_url_is_signed_for_its_key_headers_and_expiry(presigner, claims, local_aws):
    urls = presigner.urls(claims)
    place = ("team/", claims.run_id, 3, "task.0")
    for url, key in ((urls.result, result_key(*place)), (urls.failure_marker, failure_marker_key(*place, 2))):
        assert urlsplit(url).path == f"/{local_aws.bucket}/{key}"
        signed = signature(url)
        assert signed["X-Amz-Algorithm"] == "AWS4-HMAC-SHA256"
        assert signed["X-Amz-SignedHeaders"] == "content-type;host;if-none-match"
        assert signed["X-Amz-Expires"] == "600"
    assert signature(urls.result)["X-Amz-Signature"] != signature(urls.failure_marker)["X-Amz-Signature"]
    assert "X-Amz-Signature" not in repr(urls)


def test_on_aws_the_bucket_is_in_the_host_name(local_aws, claims):
    urls = Presigner(StorageConfig(bucket="some-bucket"), AwsConfig(region="eu-central-1")).urls(claims)
    assert urls.result.startswith("https://some-bucket.s3.")
    assert "eu-central-1" in signature(urls.result)["X-Amz-Credential"]


def test_a_url_writes_one_object_once(presigner, claims):
    urls = presigner.urls(claims)
    with httpx.Client() as plain:  # without credentials
        assert plain.put(urls.result, content=b"first", headers=PUT_HEADERS).status_code == 200
        assert plain.put(urls.result, content=b"second", headers=PUT_HEADERS).status_code == 412
        assert plain.put(urls.failure_marker, content=b"a failure marker", headers=PUT_HEADERS).status_code == 200


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
