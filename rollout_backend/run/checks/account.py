"""Check the AWS account: credentials, permissions, clock, and the bucket's region."""

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import aiohttp
from botocore.exceptions import BotoCoreError, ClientError

from agent_wrapper.contract import (
    artifacts_key,
    blocklist_prefix,
    lease_key,
    manifest_key,
    quarantine_prefix,
    result_key,
    score_key,
)
from rollout_backend.base import aws
from rollout_backend.base.aws import CallLog, Identity, Permission
from rollout_backend.base.check_result import CheckResult
from rollout_backend.config import RolloutConfig
from rollout_backend.run.collect.queue import queue_name

# Most AWS services refuse a call whose date is off by more than this.
_REFUSED_S = 300.0
_NOTABLE_S = 30.0
_ASK_TIMEOUT = aiohttp.ClientTimeout(total=10)
_ROLLOUT = "doctor"
# `rollout down` deletes sessions, and no session is named when they are listed.
_NOT_OF_TRAINING = {"DeleteTrainingSession", "ListTrainingSessions"}


# --- credentials ------------------------------------------------------------------------------------------


async def find_identity(config: RolloutConfig) -> tuple[Identity | None, CheckResult]:
    """Ask STS for the caller's identity, and describe how long its credentials last."""
    used = [config.aws.endpoint_of("s3"), *([config.aws.endpoint_of("sqs")] if config.uses_queue else ())]
    if config.aws.endpoint_url is None and None not in used:
        # These are not AWS credentials.
        text = "S3 and SQS are not AWS's (aws.s3_endpoint_url, aws.sqs_endpoint_url), so STS is not asked about them"
        return None, CheckResult("unchecked", "credentials", text)
    try:
        identity = await Identity.ask(config.aws.region, config.aws.endpoint_url)
    except (ClientError, BotoCoreError) as error:
        if config.aws.endpoint_url is None or not isinstance(error, ClientError) or aws.is_unknown_caller(error):
            return None, CheckResult.of_error("credentials", aws.preflight_error(error, "AWS", "aws.region"))
        why = aws.code_of(error)
    except aws.NO_ANSWER as error:
        why = aws.reason(error)
    else:
        return identity, describe_credentials(identity, config, datetime.now(UTC))
    text = f"STS does not say whose credentials these are ({why}): a store other than AWS may have no STS"
    return None, CheckResult("unchecked", "credentials", text)


def describe_credentials(identity: Identity, config: RolloutConfig, now: datetime) -> CheckResult:
    """Describe whose credentials they are, and whether they last for a step."""
    who, step_s = f"{identity.arn}, from {identity.source}", config.timeouts.collection_s
    if identity.renewed:
        return CheckResult("ok", "credentials", f"{who}, which renews them")
    if not identity.temporary:
        return CheckResult("ok", "credentials", f"{who}, which do not expire")
    advice = "a run stops when they expire. Use a role or a profile, whose credentials are renewed"
    if identity.expires_at is None:
        text = f"{who}: temporary, and it is not known until when; {advice}"
        return CheckResult("warning", "credentials", text)
    left_s = (identity.expires_at - now).total_seconds()
    text = f"{who}, which expire at {identity.expires_at:%Y-%m-%d %H:%M} UTC, in {left_s / 60:,.0f} min"
    if left_s >= step_s:
        return CheckResult("ok", "credentials", text)
    return CheckResult(
        "warning",
        "credentials",
        f"{text}: a step may take {step_s / 60:,.0f} min (timeouts.collection_s), and {advice}",
    )


# --- permissions ------------------------------------------------------------------------------------------


def needed_permissions(config: RolloutConfig, identity: Identity) -> Sequence[Permission]:
    """Return the permissions that a run needs for its bucket and its queue, where IAM's policies apply to them."""
    partition = identity.arn.split(":")[1]
    found = []
    if config.aws.endpoint_of("s3") == config.aws.endpoint_url:
        found += _of_bucket(config, f"arn:{partition}:s3:::{config.storage.bucket}")
    if config.uses_queue and config.aws.endpoint_of("sqs") == config.aws.endpoint_url:
        found += _of_queue(config, f"arn:{partition}:sqs", identity.account)
    return found + _of_training_sessions(config, f"arn:{partition}:sagemaker:{config.aws.region}:{identity.account}")


def _of_bucket(config: RolloutConfig, bucket: str) -> list[Permission]:
    prefix, run_id = config.storage.prefix, config.run_id
    written = (
        manifest_key(prefix, run_id, 0),
        lease_key(prefix, run_id),
        f"{quarantine_prefix(prefix, run_id)}{_ROLLOUT}.json",
        f"{blocklist_prefix(prefix, run_id)}{_ROLLOUT}",
        *([score_key(prefix, run_id, 0, _ROLLOUT, "digest")] if config.scoring.enabled else ()),
    )
    result = f"{bucket}/{result_key(prefix, run_id, 0, _ROLLOUT)}"
    found = [
        Permission("s3:ListBucket", (bucket,), call="ListObjectsV2"),
        Permission("s3:GetObject", (result, f"{bucket}/{written[0]}")),
        Permission("s3:PutObject", tuple(f"{bucket}/{key}" for key in written)),
        Permission("s3:DeleteObject", (f"{bucket}/{prefix}runs/preflight/manifests/probe.json",), needed=False),
    ]
    if config.storage.presigned:
        condition = (("s3:if-none-match", "*"),)
        artifacts = f"{bucket}/{artifacts_key(prefix, run_id, 0, _ROLLOUT, 1)}"
        found.append(Permission("s3:PutObject", (result, artifacts), condition, call="PutObject by a presigned URL"))
    if config.runtime.agent_protocol != "rollout":
        # The trainer writes the results.
        found.append(Permission("s3:PutObject", (result,)))
    return found


def _of_queue(config: RolloutConfig, arn: str, account: str) -> list[Permission]:
    url, region = config.queue.url, config.aws.region
    used = ("GetQueueAttributes", "ReceiveMessage", "DeleteMessage", "ChangeMessageVisibility")
    if url is not None:
        *_, owner, name = url.split("/")
        queue = f"{arn}:{region_of_queue(url) or region}:{owner}:{name}"
        return [Permission(f"sqs:{name_of}", (queue,)) for name_of in used]
    queue = f"{arn}:{region}:{account}:{queue_name(config.storage, config.run_id)}"
    both = (queue, f"{queue}-dlq")
    made = ("CreateQueue", "DeleteQueue", "GetQueueUrl")
    return [Permission(f"sqs:{name_of}", both) for name_of in (*used, *made)]


def _of_training_sessions(config: RolloutConfig, arn: str) -> list[Permission]:
    service = config.training_service
    if service is None or service.sagemaker is None or service.base_url is not None:
        return []
    sessions = (f"{arn}:training-session/rollout-{_ROLLOUT}",)
    operations = sorted(aws.added_operations("sagemaker") - _NOT_OF_TRAINING)
    passed = (("iam:PassedToService", "sagemaker.amazonaws.com"),)
    found = [
        Permission("sagemaker:ListTrainingSessions", ("*",)),
        *(Permission(f"sagemaker:{name}", sessions) for name in operations),
        Permission("iam:PassRole", (service.sagemaker.role_arn,), passed),
    ]
    policy = "TrainingSessionsPolicyArn, of a stack with TrainingSessions=true,"
    return [replace(each, policy=policy) for each in found]


def region_of_queue(url: str) -> str | None:
    """Return the region in a queue's URL; None if it is no URL of AWS."""
    found = re.match(r"https://sqs\.([a-z0-9-]+)\.amazonaws\.com", url)
    return found[1] if found else None


async def check_permissions(
    config: RolloutConfig, identity: Identity, permissions: Sequence[Permission], calls: CallLog
) -> list[CheckResult]:
    """Return a result for each permission, from IAM's simulation and from the calls that were made."""
    decisions: Mapping[Permission, str] = {}
    if identity.policy_source is None:
        why = f"IAM simulates no policies of {identity.arn}"
    else:
        why = "these credentials may not call iam:SimulatePrincipalPolicy"
        try:
            decisions = await aws.simulate(
                identity.policy_source,
                permissions,
                region=config.aws.region,
                endpoint_url=config.aws.endpoint_url,
            )
        except aws.CALL_ERRORS as error:
            if not aws.is_denied(error):
                # Most services that stand in for AWS have no such call.
                stands_in = config.aws.endpoint_url is not None
                why = (
                    "aws.endpoint_url simulates no policies"
                    if stands_in
                    else f"IAM cannot simulate policies here ({aws.reason(error)})"
                )
    return [_permission_line(each, decisions.get(each), calls.get(each.operation), why) for each in permissions]


def _permission_line(permission: Permission, decision: str | None, called: bool | None, why: str) -> CheckResult:
    """Judge one permission. `called`: whether its call was allowed; None if it was not made."""
    name, operation = permission.action, permission.operation.partition(":")[2]
    result = f"permission:{name}{':presigned' if 'presigned' in operation else ''}"
    denied = "an explicit Deny forbids it" if decision == "explicitDeny" else "no policy allows it"
    on = f"on {' and '.join(permission.resources)}"
    advice = f"attach the stack's {permission.policy} to the trainer's role, or add it to that role's policy"
    if called is False:
        text = f"{operation} was refused. It is needed {on}: {advice}"
    elif decision is None and called:
        return CheckResult("ok", name, f"a call of {operation} was allowed ({why})", result)
    elif decision is None:
        return CheckResult("unchecked", name, f"{why}, and no harmless call shows it; it is needed {on}", result)
    elif decision == "allowed":
        both = f", and {operation} was called" if called else ""
        return CheckResult("ok", name, f"allowed by iam:SimulatePrincipalPolicy{both}", result)
    elif called:
        text = (
            f"by iam:SimulatePrincipalPolicy, {denied} {on}, though a call of {operation} on another resource, or by "
        )
        return CheckResult("warning", name, f"{text}a policy of the resource itself, was allowed: {advice}", result)
    else:
        text = f"by iam:SimulatePrincipalPolicy, {denied} {on}: {advice}"
    return CheckResult("problem" if permission.needed else "warning", name, text, result)


# --- clock and region -------------------------------------------------------------------------------------


async def check_clock_and_region(config: RolloutConfig) -> list[CheckResult]:
    """Ask S3, without credentials, for the time and for the bucket's region."""
    async with aws.client("s3", region=config.aws.region, endpoint_url=config.aws.endpoint_of("s3")) as s3:
        # AWS_ENDPOINT_URL and the user's profile may name another endpoint.
        url = s3.meta.endpoint_url
    try:
        async with (
            aiohttp.ClientSession(timeout=_ASK_TIMEOUT, trust_env=True) as http,
            http.head(f"{url.rstrip('/')}/{config.storage.bucket}", allow_redirects=False) as reply,
        ):
            headers = reply.headers
    except (aiohttp.ClientError, TimeoutError) as error:
        return [CheckResult("unchecked", "clock", f"{url} gave no answer: {str(error) or type(error).__name__}")]
    found = []
    # Some stores send no date.
    with contextlib.suppress(KeyError, ValueError):
        found.append(describe_clock(time.time() - parsedate_to_datetime(headers["Date"]).timestamp()))
    if actual := headers.get("x-amz-bucket-region"):
        found.append(_region_line(config, actual))
    return found


def describe_clock(ahead_s: float) -> CheckResult:
    """Judge by how many seconds this machine's clock is ahead of S3's."""
    off_s = abs(ahead_s)
    text = f"this machine's clock is {off_s:.0f} s {'ahead of' if ahead_s > 0 else 'behind'} S3's"
    advice = "synchronise it, e.g. by chrony (`chronyc makestep`)"
    # The header has whole seconds.
    if off_s >= _REFUSED_S - 1:
        return CheckResult("problem", "clock", f"{text}: AWS refuses calls that are {_REFUSED_S:.0f} s off: {advice}")
    if off_s >= _NOTABLE_S:
        text += ": AWS refuses calls at 300 s, and presigned URLs and keys expire by that much early or late"
        return CheckResult("warning", "clock", f"{text}: {advice}")
    return CheckResult("ok", "clock", "this machine's clock agrees with S3's within 30 s")


def _region_line(config: RolloutConfig, actual: str) -> CheckResult:
    bucket, region = config.storage.bucket, config.aws.region
    if actual == region:
        return CheckResult("ok", "aws.region", f"bucket {bucket} is in {region}", "bucket-region")
    text = f"bucket {bucket} is in {actual}, and aws.region is {region}: set aws.region={actual}"
    return CheckResult("problem", "aws.region", text, "bucket-region")
