"""Open AWS clients and explain their errors."""

from rollout_backend.aws.call_log import CallLog, log_call, logged_calls
from rollout_backend.aws.clients import Client, client, preload, read_up_to
from rollout_backend.aws.errors import (
    CALL_ERRORS,
    NO_ANSWER,
    NO_CONNECTION,
    NO_CREDENTIALS,
    UNSIGNED,
    code_of,
    is_denied,
    is_expired,
    is_throttled,
    is_unknown_caller,
    is_wrong_clock,
    message_of,
    preflight_error,
    raise_if_expired,
    reason,
    status_of,
    was_sent,
)
from rollout_backend.aws.identity import Identity, Permission, simulate
from rollout_backend.aws.repeated_call import RepeatedCall

__all__ = [
    "CALL_ERRORS",
    "NO_ANSWER",
    "NO_CONNECTION",
    "NO_CREDENTIALS",
    "UNSIGNED",
    "CallLog",
    "Client",
    "Identity",
    "Permission",
    "RepeatedCall",
    "client",
    "code_of",
    "is_denied",
    "is_expired",
    "is_throttled",
    "is_unknown_caller",
    "is_wrong_clock",
    "log_call",
    "logged_calls",
    "message_of",
    "preflight_error",
    "preload",
    "raise_if_expired",
    "read_up_to",
    "reason",
    "simulate",
    "status_of",
    "was_sent",
]
