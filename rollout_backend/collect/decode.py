"""Decode and validate result objects, large ones off the event loop.

Invariants:

- Large results are decoded one at a time, so that several hostile ones cannot exhaust the memory together.
- A decoded result satisfies the contract, belongs to its key, and has a valid seal if it needs one. The fetcher
  checks its session, see `ResultSink.session_id`.
"""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from agent_wrapper.contract import ContractError, Outcome, ResultName, Rollout
from agent_wrapper.contract.codec import ExpandedBeyondCap, unpacked_size

# Decoding takes 5 ms per MB in the compact form and 30 ms in JSON; a hostile object of 64 KiB takes up to 20 ms.
_LARGE_BYTES = 64 * 1024


class ResultDecoder:
    """Decodes the results of one run."""

    def __init__(self, run_id: str, max_bytes: int, verify: Callable[[Rollout], None] | None = None) -> None:
        """`verify` raises ContractError for tokens that the gateway did not seal. See `core.seal`."""
        self._run_id = run_id
        self._max_bytes = max_bytes
        self._verify = verify
        self._large = ThreadPoolExecutor(1, "decode")

    async def decode(self, data: bytes, name: ResultName) -> Rollout:
        """Decode the result or failure marker that was stored under the key of `name`.

        Raises:
            ContractError: the object is invalid; names the field.
        """
        if unpacked_size(data) < _LARGE_BYTES:
            with contextlib.suppress(ExpandedBeyondCap):  # a small object may contain large shared segments
                return self._decode(data, name, min(_LARGE_BYTES, self._max_bytes))
        # A thread, not a process: the event loop waits for at most one call into C (28 ms of 81 ms for a compact
        # result of 9 MB), and a process would take as long to send the decoded result back. It goes from one result
        # to the next without the loop, because each hand-over would first wait for the interpreter's lock.
        return await asyncio.get_running_loop().run_in_executor(
            self._large, self._decode, data, name, self._max_bytes
        )

    def _decode(self, data: bytes, name: ResultName, max_bytes: int) -> Rollout:
        rollout = Rollout.decode(data, max_bytes)
        self._check(rollout, name)
        if self._verify is not None:
            self._verify(rollout)
        return rollout

    def _check(self, rollout: Rollout, name: ResultName) -> None:
        wanted: dict[str, object] = {"run_id": self._run_id, "step": name.step, "rollout_id": name.rollout_id}
        if name.attempt is not None:
            wanted |= {"attempt": name.attempt, "outcome": Outcome.INFRA_ERROR}
        for field, value in wanted.items():
            if getattr(rollout, field) != value:
                raise ContractError(field, f"is {getattr(rollout, field)!r} in the result of {value!r}")
        if rollout.score is not None:
            raise ContractError("score", "is set, which only the training side may do")
