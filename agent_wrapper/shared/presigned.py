"""Write a result through a presigned URL: one PUT, and no credentials in the container.

Invariant: the URL grants access to the bucket, so it never appears in an error message or log record.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from agent_wrapper.contract import put_headers
from agent_wrapper.shared.redaction import redact_logs, without_secrets

if TYPE_CHECKING:
    import httpx
    import tenacity

_CONNECT_TIMEOUT_S = 5.0
_TIMEOUT_S = 20.0
_CODE = re.compile(r"<Code>([\w.]{1,64})</Code>")
# S3 answers 400 when KMS throttles it or a body arrives too slowly, and 403 when the clock is wrong, for example
# after the restore of a snapshot.
_TRANSIENT = re.compile("Throttl|Timeout|TooSkewed|SlowDown|LimitExceeded|RequestExpired|InTheFuture|Conflict")


class PutRefused(Exception):
    """S3 refused the object or could not be reached in time. The message says why."""


def put_once(url: str, body: bytes, budget_s: float) -> bool:
    """Write `body`. Return False if the object exists, from another attempt, or from this one if a response was lost.

    Raises:
        PutRefused: the retries used up `budget_s`, or the error is permanent.
    """
    import httpx  # imported on first use: see shared/trajectory.py
    import tenacity

    put = write_retry(
        tenacity.retry_if_exception_type(httpx.TransportError) | tenacity.retry_if_result(_is_transient),
        budget_s,
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,  # as it was, last
    )
    verify = not url.startswith("http://")
    timeout = httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    redact_logs()
    try:
        with httpx.Client(timeout=timeout, verify=verify) as client:
            response: httpx.Response = put(client.put, url, content=body, headers=put_headers(body))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PutRefused(without_secrets(f"{type(error).__name__}: {error}")) from None
    if response.status_code == 412:
        return False
    if not response.is_success:
        raise PutRefused(f"S3 answered {response.status_code} {_code(response) or response.reason_phrase}")
    return True


def write_retry(when: tenacity.retry_base, budget_s: float, **more: Any) -> tenacity.Retrying:
    """Return a retrier that repeats a write while `when` holds, for at most `budget_s`."""
    import tenacity

    wait = tenacity.wait_exponential_jitter(multiplier=0.2, max=8.0, jitter=0.5)
    return tenacity.Retrying(retry=when, stop=tenacity.stop_before_delay(budget_s), wait=wait, **more)


def is_transient(status: int, code: str) -> bool:
    """Return whether S3 or SQS may accept the same request later, given the status and the code of its error."""
    return status in (408, 409, 429) or status >= 500 or _TRANSIENT.search(code) is not None


def _is_transient(response: httpx.Response) -> bool:
    return is_transient(response.status_code, _code(response))


def _code(response: httpx.Response) -> str:
    code = _CODE.search(response.text) if response.is_error else None
    return code[1] if code else ""
