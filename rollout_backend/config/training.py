"""The `training` section."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from rollout_backend.config.section import Section

Mask = Literal["agent_error", "last_reply_cut", "row_cut"]


class LeftOut(Section):
    """Model calls that are answered and not trained. A call is left out if it matches all that is set."""

    model: str | None = None
    """The model that the call names. It is answered by the served model, under any name given here."""
    system: str | None = None
    """A text that the call's first system message contains."""
    header: str | None = None
    """A header of the request, as `name: value`; or `name`, with any value."""

    @model_validator(mode="after")
    def _is_set(self) -> Self:
        if not (self.model or self.system or self.header):
            raise ValueError("would leave out every call: set model, system or header")
        return self


class TrainingConfig(Section):
    """What is trained of the collected rollouts. See
    [training-options.md](training-options.md#mask-truncated-episodes)."""

    leave_out: tuple[LeftOut, ...] = ()
    """Conversations that are left out of training, such as titles that a coding agent writes beside its task: a list
    of `model`, `system` and `header`. The report counts their calls. Default: none."""

    mask: tuple[Mask, ...] = ()
    """Rollouts that are not trained although they have a reward, and are in no baseline. `last_reply_cut`: those
    whose last reply ended at `max_tokens` or at the end of the context. `row_cut`: those with sampled tokens beyond
    `data.max_response_length`. `agent_error`: those whose agent failed and scored itself. Default: none."""
