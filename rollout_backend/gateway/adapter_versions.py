"""Which version of each LoRA adapter the engines of this gateway serve.

Invariant: a new attempt of a model call names the newest version that the trainer has announced.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollout_backend.core.adapter import NamedAdapter


class AdapterVersions:
    """The newest version of each adapter that the trainer loads into its engines."""

    def __init__(self, versions: Mapping[str, int] | None = None) -> None:
        self._versions = dict(versions or {})

    def replace(self, versions: Mapping[str, int]) -> None:
        """Set the newest version of every adapter."""
        self._versions = dict(versions)

    def newest(self, name: str) -> NamedAdapter | None:
        """Return the adapter as a call names it now; None without a name, for the model's own weights.

        An adapter without a version was loaded by the engine's operator.
        """
        return NamedAdapter(name, self._versions.get(name)) if name else None
