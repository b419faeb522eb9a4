"""Send the invokes of a run, within the runtime's rate and number of sessions.

Invariants:

- an invoke is sent only in its turn, by a caller that holds a slot;
- an answer that is not the wrapper's acceptance is an error: no agent runs.

Which attempts are made, and what becomes of their sessions: see `step.rollout_task`.
"""

import asyncio
import json
from contextlib import AbstractContextManager

from rollout_backend.core.ledger import CallTally
from rollout_backend.dispatch.call_queue import CallKind, CallQueue
from rollout_backend.errors import InvokeRejected
from rollout_backend.runtimes.base import SessionCalls

_ACCEPTED = frozenset({"accepted", "running", "finished"})


class Dispatcher:
    """Sends the invokes of all steps of a run.

    A rollout holds one of `slots` from before its first invoke until its session is closed.
    """

    def __init__(self, runtime: SessionCalls, calls: CallQueue, *, max_sessions: int) -> None:
        self._runtime = runtime
        self._calls = calls
        self.slots = asyncio.Semaphore(max_sessions)

    @property
    def invoke_per_s(self) -> float:
        """Return how many invokes are sent per second at most, at this moment."""
        return self._calls.invoke_per_s

    async def turn(self) -> None:
        """Wait until one invoke may be sent."""
        await self._calls.admit(CallKind.INVOKE)

    def track(self, tally: CallTally) -> AbstractContextManager[None]:
        """Adapt the rate to the outcome of the invoke in this block."""
        return self._calls.track(CallKind.INVOKE, tally)

    async def submit(self, session_id: str, payload: bytes) -> None:
        """Start the agent in a session.

        Raises:
            RuntimeCallError: no agent runs, or nothing is known of it.
        """
        answer = await self._runtime.invoke(session_id, payload)
        try:
            status = json.loads(answer)["status"]
        except (ValueError, KeyError, TypeError):
            status = None
        if status not in _ACCEPTED:
            raise InvokeRejected(
                f"the agent answered {answer[:200]!r} instead of accepting the rollout: is its function wrapped in "
                "RolloutApp, or its BedrockAgentCoreApp imported from agent_wrapper.bedrock_agentcore, and the "
                "deployed image the current one?",
                reason="not_a_rollout_app",
            )
