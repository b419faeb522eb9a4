"""Recognise the temporary errors of S3 and SQS."""

import re

# S3 answers 400 when KMS throttles it or a body arrives too slowly, and 403 when the clock is wrong, for example
# after the restore of a snapshot.
_TRANSIENT = re.compile("Throttl|Timeout|TooSkewed|SlowDown|LimitExceeded|RequestExpired|InTheFuture|Conflict")


def is_transient(status: int, code: str) -> bool:
    """Return whether S3 or SQS may accept the same request later, given the status and the code of its error."""
    # AWS names each of its refusals. Without a name it is a proxy's: botocore then takes the status for the code.
    is_foreign = status >= 300 and (not code or code.isdecimal())
    return status in (408, 409, 429) or status >= 500 or is_foreign or _TRANSIENT.search(code) is not None
