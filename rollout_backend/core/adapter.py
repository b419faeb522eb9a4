"""The LoRA adapter that a model call names, and the labels of the tokens that it sampled. Pure.

A token's label is its weight version: `3` for version 3 of the model's weights, `math@3` for version 3 of the adapter
`math`.
"""

import re
from dataclasses import dataclass

_MARK = "@"
_NUMBER = re.compile("-?[0-9]{1,18}")


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter in a request to an engine. `version` is None if the engine's operator replaces the adapter in place;
    its tokens then carry the weight version that the engine reports."""

    name: str
    version: int | None = None

    @property
    def engine_name(self) -> str:
        """The engine's name of the adapter. Each version has a separate name, so that an engine never uses an older
        version's prefix cache and always samples with the version that the gateway records."""
        return self.name if self.version is None else f"{self.name}{_MARK}{self.version}"

    def label(self, reported: str) -> str:
        """Return the label of tokens for which the engine reports this weight version."""
        return f"{self.name}{_MARK}{reported}" if self.version is None else self.engine_name


def number_of(label: str) -> int | None:
    """Return a label's version number; None for a label without one, such as SGLang's "default"."""
    number = _NUMBER.fullmatch(label.rpartition(_MARK)[2])
    return int(number[0]) if number is not None else None


def renumbered(label: str, number: int) -> str:
    """Return the label with another version number."""
    name, mark, _ = label.rpartition(_MARK)
    return f"{name}{mark}{number}"
