"""Define how the buffer delivers results to a step."""

from typing import Protocol

from agent_wrapper.contract import ContractError, Rollout


class ResultSink(Protocol):
    """A step that receives results."""

    step: int

    def is_wanted(self, rollout_id: str, attempt: int | None = None) -> bool:
        """Return whether the rollout's result is wanted or, with `attempt`, this attempt's failure marker."""
        ...

    def record_duplicate(self, rollout_id: str) -> None:
        """Count an announcement that is not wanted: already settled, never planned, or from an abandoned attempt."""
        ...

    def on_result(
        self,
        rollout: Rollout,
        data: bytes,
        announced_at: float | None,
        failure_marker: bool = False,
        fetch_s: float = 0.0,
    ) -> None:
        """Accept a valid result or failure marker; `data` is its encoded form. `announced_at` is None if it was found
        by listing. `fetch_s` is the time of its fetch and validation."""
        ...

    def on_invalid_result(self, rollout_id: str, error: ContractError) -> None:
        """Settle a rollout whose result is invalid."""
        ...

    def session_id(self, rollout_id: str, attempt: int) -> str:
        """Return the session id that this attempt's result must name."""
        ...

    def pending(self) -> list[tuple[str, int]]:
        """Return the unsettled rollouts, each with the number of its current attempt."""
        ...
