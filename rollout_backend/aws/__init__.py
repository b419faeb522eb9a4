"""AWS clients, and the meaning of their errors."""

from rollout_backend.aws.clients import client, read_up_to
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
    message_of,
    preflight_error,
    raise_if_expired,
    status_of,
    was_sent,
)

__all__ = [
    "CALL_ERRORS",
    "NO_ANSWER",
    "NO_CONNECTION",
    "NO_CREDENTIALS",
    "UNSIGNED",
    "client",
    "code_of",
    "is_denied",
    "is_expired",
    "is_throttled",
    "message_of",
    "preflight_error",
    "raise_if_expired",
    "read_up_to",
    "status_of",
    "was_sent",
]
