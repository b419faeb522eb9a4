"""Whose credentials this process has, and until when."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Self

from rollout_backend.aws.clients import client, credentials

_STATIC = frozenset({"env", "shared-credentials-file", "config-file"})  # botocore's names of where it found them


@dataclass(frozen=True)
class Identity:
    """The caller of this process's calls, as STS names it."""

    arn: str
    account: str
    source: str
    """Where the credentials were found, by botocore's name."""
    temporary: bool
    renewed: bool
    """Whether they are renewed before they expire."""
    expires_at: datetime | None
    """None if they do not expire, or if it is not known."""

    @classmethod
    async def ask(cls, region: str, endpoint_url: str | None) -> Self:
        """Ask STS, which answers every caller with valid credentials.

        Raises ClientError, BotoCoreError, or another of `CALL_ERRORS`.
        """
        async with client("sts", region=region, endpoint_url=endpoint_url, retries=1) as sts:
            caller = await sts.get_caller_identity()
        found = await credentials(endpoint_url)
        return cls(
            arn=str(caller["Arn"]),
            account=str(caller["Account"]),
            source=found.source,
            temporary=found.temporary,
            renewed=found.source not in _STATIC,
            expires_at=found.expires_at,
        )

    @property
    def policy_source(self) -> str | None:
        """The ARN whose policies apply: that of a user, or of a role that was assumed. None for other callers."""
        head, _, resource = self.arn.rpartition(":")
        kind, *names = resource.split("/")
        if kind == "user":
            return self.arn
        if kind == "assumed-role":
            return f"{head.replace(':sts:', ':iam:')}:role/{names[0]}"
        return None
