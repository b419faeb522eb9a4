"""Uploads exported files to S3, where pandas, polars and DuckDB read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from botocore.exceptions import BotoCoreError, ClientError

from rollout_backend import aws
from rollout_backend.config.results import AwsConfig
from rollout_backend.errors import ConfigError

SCHEME = "s3://"


@dataclass(frozen=True)
class S3Folder:
    """A prefix of a bucket."""

    bucket: str
    prefix: str  # empty, or ends in a slash

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse `s3://BUCKET/PREFIX`; the prefix may be left out.

        Raises:
            ConfigError: the URL names no bucket.
        """
        bucket, _, prefix = url.removeprefix(SCHEME).partition("/")
        if not bucket:
            raise ConfigError(f"{url} names no bucket: it must be s3://BUCKET/PREFIX")
        prefix = prefix.strip("/")
        return cls(bucket, f"{prefix}/" if prefix else "")

    def url_of(self, file: Path) -> str:
        """Return the URL of an uploaded file."""
        return f"{SCHEME}{self.bucket}/{self.prefix}{file.name}"

    async def upload(self, files: Iterable[Path], config: AwsConfig) -> None:
        """Upload files one after the other. Each replaces the object of its name when it is complete.

        Raises:
            ConfigError: S3 refuses a file, and why.
        """
        async with aws.client("s3", region=config.region, endpoint_url=config.endpoint_url, retries=4) as s3:
            for file in files:
                try:
                    await s3.upload_file(str(file), self.bucket, f"{self.prefix}{file.name}")
                except (ClientError, BotoCoreError) as error:
                    raise ConfigError(str(aws.preflight_error(error, f"bucket {self.bucket}", "--out"))) from None
