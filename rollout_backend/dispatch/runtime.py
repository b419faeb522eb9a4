"""What the dispatcher needs of an agent runtime: two calls, and errors of known kinds.

Implementations make no retries of their own: the dispatcher's limiter must see every call, and a retry in a new
session is the dispatcher's to decide.
"""

from __future__ import annotations

from typing import Protocol


class AgentRuntime(Protocol):
    async def check(self) -> None:
        """Finds out, before anything is spent, whether calls can work. Raises PreflightError."""
        ...

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        """Starts the agent in the session, which starts with this call. Returns the container's answer.

        Raises:
            RuntimeCallError: a subclass, by what may be done about it.
        """
        ...

    async def stop(self, session_id: str) -> None:
        """Ends the session. One that is gone already is a success.

        Raises:
            RuntimeCallError: a subclass, by what may be done about it.
        """
        ...

    async def aclose(self) -> None: ...
