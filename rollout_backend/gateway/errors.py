"""What an agent's call can fail with. Each dialect has a shape of its own for it."""

from __future__ import annotations

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "session_closed",
    413: "request_too_large",
    429: "rate_limit_error",
}
_ADOPTION_S = 10  # engines take minutes to be ready, and clients have a number of tries


class ApiError(Exception):
    """An answer other than 200. `code` is what errors are counted by; `retry_after_s` invites another try."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code or ("invalid_request" if status == 400 else self.type)
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def not_adopted() -> ApiError:
    return ApiError(
        503,
        "the trainer was started again and has not said yet whether this session goes on; come again",
        code="not_adopted",
        retry_after_s=_ADOPTION_S,
    )


def journal_unwritable() -> ApiError:
    return ApiError(
        503,
        "the gateway cannot write down what this session samples, so it is closed; the gateway's log says why",
        code="journal_unwritable",
    )


def session_closed(why: str) -> ApiError:
    return ApiError(410, f"this session is closed ({why}); it cannot call the model any more", code="session_closed")
