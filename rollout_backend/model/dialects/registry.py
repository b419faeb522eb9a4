"""List the dialects that a gateway serves."""

from collections.abc import Mapping, Sequence

from rollout_backend.model.dialects.anthropic_messages import AnthropicMessages
from rollout_backend.model.dialects.base import Dialect
from rollout_backend.model.dialects.openai_chat import OpenAIChat
from rollout_backend.model.dialects.openai_completions import OpenAICompletions
from rollout_backend.model.dialects.openai_responses import OpenAIResponses

DIALECTS: tuple[type[Dialect], ...] = (
    # The first dialect shapes errors for unknown clients.
    OpenAIChat,
    OpenAICompletions,
    OpenAIResponses,
    AnthropicMessages,
)


def dialect_of_client(dialects: Sequence[Dialect], path: str, headers: Mapping[str, str]) -> Dialect:
    """Return the dialect of the client that sent a request, by its header or path; the first dialect if unknown."""
    by_header = (each for each in dialects if each.client_header is not None and each.client_header in headers)
    by_path = (each for each in dialects if each.path in path)
    return next(by_header, None) or next(by_path, None) or dialects[0]
