"""Identify the caller, and simulate whether the caller's policies allow the calls of a run."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from rollout_backend.base.aws.clients import client

_STRICTEST_FIRST = ("explicitDeny", "implicitDeny", "allowed")
# botocore's names for the sources that do not renew credentials.
_STATIC = frozenset({"env", "shared-credentials-file", "config-file"})


@dataclass(frozen=True)
class Identity:
    """The caller of this process's calls, as returned by STS."""

    arn: str
    account: str
    source: str
    """Source of the credentials, by botocore's name."""
    temporary: bool
    renewed: bool
    """Whether the credentials are renewed before they expire."""
    expires_at: datetime | None
    """Expiry time; None if they do not expire, or if it is unknown."""

    @classmethod
    async def ask(cls, region: str, endpoint_url: str | None) -> Self:
        """Ask STS, which answers every caller that has valid credentials.

        Raises ClientError, BotoCoreError, or another of `CALL_ERRORS`.
        """
        async with client("sts", region=region, endpoint_url=endpoint_url, retries=1) as sts:
            caller = await sts.get_caller_identity()
            found = sts.credentials
            frozen = await found.get_frozen_credentials()
        return cls(
            arn=str(caller["Arn"]),
            account=str(caller["Account"]),
            source=str(found.method),
            temporary=frozen.token is not None,
            renewed=found.method not in _STATIC,
            expires_at=found.expires_at,
        )

    @property
    def policy_source(self) -> str | None:
        """ARN whose policies apply: a user's, or that of an assumed role. None for other callers."""
        head, _, resource = self.arn.rpartition(":")
        kind, *names = resource.split("/")
        if kind == "user":
            return self.arn
        if kind == "assumed-role":
            return f"{head.replace(':sts:', ':iam:')}:role/{names[0]}"
        return None


@dataclass(frozen=True)
class Permission:
    """An action that a run performs on each of its resources."""

    action: str
    resources: tuple[str, ...]
    context: tuple[tuple[str, str], ...] = ()
    """Condition keys of the call and their values."""
    call: str = ""
    """The operation that needs the action, if it has a different name."""
    needed: bool = True
    """False if a run works without the permission and then does less."""
    policy: str = "TrainerPolicyArn"
    """The stack's output with the policy that has it."""

    @property
    def operation(self) -> str:
        """The call that needs the permission, such as `s3:ListObjectsV2`."""
        service, _, name = self.action.partition(":")
        return f"{service}:{self.call or name}"


async def simulate(
    policy_source: str, permissions: Iterable[Permission], *, region: str, endpoint_url: str | None
) -> Mapping[Permission, str]:
    """Return IAM's decision about each permission: `allowed`, `explicitDeny` or `implicitDeny`.

    IAM evaluates the caller's own policies and boundary, not the resources' policies.

    Raises ClientError, BotoCoreError, or another of `CALL_ERRORS`.
    """
    alike: dict[object, list[Permission]] = defaultdict(list)
    for permission in permissions:
        alike[permission.resources, permission.context].append(permission)
    decisions: dict[Permission, str] = {}
    async with client("iam", region=region, endpoint_url=endpoint_url, retries=3) as iam:
        for group in alike.values():
            answer = await iam.simulate_principal_policy(
                PolicySourceArn=policy_source,
                ActionNames=[permission.action for permission in group],
                ResourceArns=list(group[0].resources),
                ContextEntries=[
                    {"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": "string"}
                    for key, value in group[0].context
                ],
            )
            found: dict[str, list[str]] = defaultdict(list)
            for result in answer["EvaluationResults"]:
                each = [one["EvalResourceDecision"] for one in result.get("ResourceSpecificResults") or ()]
                found[result["EvalActionName"].lower()] += each or [result["EvalDecision"]]
            for permission in group:
                decided = found[permission.action.lower()]
                decisions[permission] = min(decided, key=_STRICTEST_FIRST.index, default="implicitDeny")
    return decisions
