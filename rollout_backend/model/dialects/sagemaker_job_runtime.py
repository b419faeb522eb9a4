"""Translate the operations Sample and SampleWithResponseStream of SageMaker's job runtime.

Their bodies are those of OpenAI's Chat Completions API. A stream has the same events as there, as plain bytes:
botocore's model of the service declares a blob. Errors have the form of AWS's JSON protocol, whose clients raise
the class that `__type` names.
"""

from dataclasses import replace
from typing import Any

from rollout_backend.model.dialects.openai_chat import OpenAIChat
from rollout_backend.model.model_call import ApiError, ModelCall

_ERRORS = {
    401: "AccessDeniedException",
    403: "AccessDeniedException",
    404: "ResourceNotFoundException",
    409: "ConflictException",
    410: "ConflictException",
    429: "ThrottlingException",
}
_MAX_MESSAGE = 1024


class Sample(OpenAIChat):
    """The dialect of `POST /sample`."""

    name = "sagemaker_sample"
    path = "/sample"

    def error_body(self, error: ApiError) -> dict[str, Any]:
        kind = _ERRORS.get(error.status, "ValidationException" if error.status < 500 else "InternalServiceError")
        return {"__type": kind, "Message": error.message[:_MAX_MESSAGE]}


class SampleWithResponseStream(Sample):
    """The dialect of `POST /sample-with-response-stream`."""

    name = "sagemaker_sample_stream"
    path = "/sample-with-response-stream"

    def parse(self, body: bytes) -> ModelCall:
        return replace(super().parse(body), stream=True)
