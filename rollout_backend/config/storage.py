"""The `storage` section."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from rollout_backend.config.section import Section

MAX_URL_S = 7 * 24 * 3600  # S3 signs no URL for longer


class StorageConfig(Section):
    bucket: str = Field(min_length=3, max_length=63)
    """Bucket for results. It must exist."""
    prefix: str = ""
    """Prefix of every key; empty, or ends in a slash."""
    max_result_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    """Larger results, packed or unpacked, are refused and quarantined."""
    presigned: bool = False
    """Agents write results through URLs that are presigned for each attempt, so that their containers need no cloud
    credentials. They then announce nothing: S3 notifies `queue.url`, or the backend finds results by listing. See
    [security.md](security.md#without-cloud-credentials)."""

    @field_validator("bucket", mode="before")
    @classmethod
    def _is_a_name(cls, value: object) -> object:
        if isinstance(value, str) and ("/" in value or ":" in value):
            raise ValueError("must be the bucket's name alone, such as my-bucket: no s3://, no ARN and no path")
        return value

    @field_validator("prefix")
    @classmethod
    def _ends_in_slash(cls, value: str) -> str:
        if value and not re.fullmatch(r"(?:[A-Za-z0-9._-]+/)+", value):
            raise ValueError("must be empty, or path parts of letters, digits, '.', '_' and '-' that end in a slash")
        return value
