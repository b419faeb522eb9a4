"""Errors that agents' calls may receive. Each dialect formats them for its API."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "session_closed",
    413: "request_too_large",
    429: "rate_limit_error",
}
_ADOPTION_S = 10  # engines take minutes to be ready, and clients make a limited number of retries


NO_TOOL_PARSER = (
    "this model's tool calls cannot be parsed. Set model.renderer to the renderer of its family, or tool_parser in "
    "model.renderer_options to the parser of its calls"
)


class ApiError(Exception):
    """A response other than 200. Errors are counted by `code`.

    `retry_after_s` asks the client to retry; `permanent`, on a 5xx, asks it not to.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        permanent: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code or ("invalid_request" if status == 400 else self.type)
        self.param = param
        self.retry_after_s = retry_after_s
        self.permanent = permanent

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status in (401, 404):  # unauthenticated clients must not hold connections
            headers["Connection"] = "close"
        # OpenAI's and Anthropic's clients follow this header.
        return {**headers, "x-should-retry": "false"} if self.permanent else headers


def context_exceeded(message: str) -> ApiError:
    return ApiError(400, message, code="context_length_exceeded", param="messages")


def not_adopted() -> ApiError:
    return ApiError(
        503,
        "the trainer restarted and has not resumed this session yet; retry later",
        code="not_adopted",
        retry_after_s=_ADOPTION_S,
    )


def journal_unwritable() -> ApiError:
    return ApiError(
        503,
        "the gateway cannot write the journal of this session, so the session is closed; see the gateway's log",
        code="journal_unwritable",
    )


def trajectory_too_large(segments: int, error: object) -> ApiError:
    return ApiError(
        413,
        f"the trajectory of this session, with {segments} segments, is larger than a result may be ({error}): raise "
        "storage.max_result_bytes, or let the agent rewrite its history less often, because each rewriting opens a "
        "segment",
        code="trajectory_too_large",
    )


def session_closed(why: str) -> ApiError:
    return ApiError(410, f"this session is closed ({why}); it cannot call the model any more", code="session_closed")
