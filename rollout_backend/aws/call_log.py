"""Log which calls AWS has allowed and refused, as evidence of permissions for a check before a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

CallLog = dict[str, bool]
"""Whether every call was allowed, by service and operation, such as `s3:GetObject`."""

_log: ContextVar[CallLog | None] = ContextVar("_log", default=None)


@contextmanager
def logged_calls() -> Iterator[CallLog]:
    """Log the calls of this task and of the tasks that it starts."""
    calls: CallLog = {}
    token = _log.set(calls)
    try:
        yield calls
    finally:
        _log.reset(token)


def log_call(service: str, operation: str, status: int, code: str) -> None:
    """Log a response if it shows whether the caller has the permission, which AWS checks before the arguments."""
    calls = _log.get()
    if calls is None:
        return
    name = f"{service}:{operation}"
    if code.startswith("AccessDenied"):
        calls[name] = False
    elif status < 400 or status in (404, 409, 412) or "ReceiptHandle" in code:
        calls.setdefault(name, True)
