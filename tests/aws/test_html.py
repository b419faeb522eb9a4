"""Answers that are HTML pages of a proxy, or of a server that is not AWS."""

import pytest
from botocore.parsers import ResponseParserError

from rollout_backend import aws
from rollout_backend.aws import Permission
from stub_server import Request, StubServer

PAGE = b"<!doctype html>\n<html lang=en><title>403 Forbidden</title><h1>Forbidden</h1></html>"


@pytest.mark.parametrize("status", [403, 404])
async def test_a_page_shows_as_its_status_in_every_protocol(local_keys, status):
    def answer(_: Request) -> tuple[int, bytes]:
        return status, PAGE

    with StubServer(answer) as server:
        place = {"region": "us-east-1", "endpoint_url": server.url}
        calls = [("sts", "get_caller_identity", {}), ("s3", "list_objects_v2", {"Bucket": "b"})]
        calls.append(("service-quotas", "list_service_quotas", {"ServiceCode": "s"}))
        for service, method, arguments in calls:
            async with aws.client(service, **place) as client:
                with pytest.raises(aws.CALL_ERRORS) as caught:
                    await getattr(client, method)(**arguments)
            said = aws.reason(caught.value)
            assert str(status) in said
            assert "<" not in said
        with pytest.raises(aws.CALL_ERRORS) as caught:
            await aws.simulate("arn:aws:iam::000000000000:role/r", [Permission("s3:GetObject", ("*",))], **place)
        assert aws.reason(caught.value) == f"{status}: an HTML page"


async def test_a_page_with_status_200_is_no_answer(local_keys):
    with StubServer(lambda _: (200, PAGE)) as server:
        async with aws.client("sts", region="us-east-1", endpoint_url=server.url) as client:
            with pytest.raises(ResponseParserError, match="is answered 200 with an HTML page, not by AWS"):
                await client.get_caller_identity()
