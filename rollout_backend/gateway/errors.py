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


def session_closed(why: str) -> ApiError:
    return ApiError(410, f"this session is closed ({why}); it cannot call the model any more", code="session_closed")
