"""Upload a file of a deployment to the target's bucket."""

import asyncio
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from rollout_backend import aws
from rollout_backend.deploy.target import Target


async def upload_once(target: Target, key: str, path: Path) -> None:
    """Upload a file under a key that identifies its content, unless the key exists.

    Raises:
        PreflightError: the bucket refuses the upload.
    """
    body = await asyncio.to_thread(path.read_bytes)
    try:
        async with aws.client(
            "s3", region=target.region, endpoint_url=target.endpoint_url, read_timeout_s=300.0, retries=4
        ) as s3:
            await s3.put_object(Bucket=target.bucket, Key=key, Body=body, IfNoneMatch="*")
    except ClientError as error:
        if aws.status_of(error) != 412:
            raise aws.preflight_error(error, f"bucket {target.bucket}", "--stack") from error
    except BotoCoreError as error:
        raise aws.preflight_error(error, f"bucket {target.bucket}", "--stack") from error
