"""Join the text parts of a message as the engine's own endpoints do, so that the deployed model reads the same. Pure.

SGLang joins them with a space and vLLM with a newline, unless the chat template takes a message's parts as a list:
then the template prints one after the other. Some fields are joined in another way, whatever the template takes.
"""

import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple


class Separators(NamedTuple):
    """The text between two parts. An assistant's parts have none, because they are pieces of what was sampled."""

    message: str = ""
    result: str = ""
    """The separator in a tool's result."""
    output: str = ""
    """The separator in a call's output, in the Responses API."""
    system: str = ""
    """The separator in `system`, in the Messages API."""


# How SGLang 0.5.23 and vLLM recognize a template that takes lists.
_TAKES_LISTS: dict[str, Callable[[str], object]] = {
    "sglang": re.compile(r"image|audio|video|vision|\bfor\s+\w+\s+in\s+(message|msg|m)(\.|\[['\"])content\b").search,
    "vllm": re.compile(r"\bfor\s+\w+\s+in\s+(\w+(\.|\[['\"]))?content\b").search,
}


def separators(engine: Literal["sglang", "vllm"], template: str | Mapping[str, str] | None) -> Separators:
    """Return the separators that the engine uses for a model with this chat template.

    `template` may also map names to templates, as tokenizers with several do.
    """
    text = template if isinstance(template, str) else " ".join((template or {}).values())
    takes_lists = bool(_TAKES_LISTS[engine](text))
    if engine == "vllm":
        return Separators("" if takes_lists else "\n", result="\n", output="\n")
    return Separators("" if takes_lists else " ", result=" ", system="\n")
