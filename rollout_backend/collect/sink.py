"""The interface of a step towards the buffer that collects its results."""

from typing import Protocol

from agent_wrapper.contract import ContractError, Rollout


class ResultSink(Protocol):
    """A step that receives results."""

    step: int

    def is_wanted(self, rollout_id: str, attempt: int | None = None) -> bool:
        """Return whether the rollout's result is wanted or, with `attempt`, this attempt's failure marker."""
        ...

    def record_duplicate(self, rollout_id: str) -> None:
        """Count an announcement that is not wanted: settled already, never planned, or of an abandoned attempt."""
        ...

    def on_result(
        self,
        rollout: Rollout,
        data: bytes,
        announced_at: float | None,
        failure_marker: bool = False,
        fetch_s: float = 0.0,
    ) -> None:
        """Accept a valid result or failure marker, which is `data` in its encoded form. `announced_at` is None if it
        was found by listing. `fetch_s`: how long its fetch and validation took."""
        ...

    def on_invalid_result(self, rollout_id: str, error: ContractError) -> None:
        """Settle a rollout whose result is invalid."""
        ...

    def session_id(self, rollout_id: str, attempt: int) -> str:
        """Return the session id that this attempt's result must name."""
        ...

    def pending(self) -> list[tuple[str, int]]:
        """Return the rollouts that are not settled, each with the number of its current attempt."""
        ...
