"""Hold one model call in flight: its deltas so far, and its listeners.

Invariants:

- Every listener gets all deltas from the beginning.
- A call without listeners is aborted.
- An answered call keeps its answer but not its messages, because each call repeats all messages before it.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Self
from uuid import uuid4

from rollout_backend.core.api_error import session_closed
from rollout_backend.core.model_call import Answer, Delta, ModelCall
from rollout_backend.gateway.sessions.conversations import RecordedReply
from rollout_backend.rendering.streaming_parser import whole_deltas


class InFlightCall:
    """A model call in flight. A listener calls `join`, sets `delivered` once it has the answer, and calls `leave`."""

    def __init__(
        self,
        call: ModelCall,
        request: bytes = b"",
        question: bytes = b"",
        *,
        is_retry: bool = False,
        brief: bool = True,
        left_out: bool = False,
    ) -> None:
        """`request` is the digest that identifies retries of the request, `question` the digest of its messages and
        tools. If `brief`, the event loop may render it; if `left_out`, it is not trained."""
        self.call = call
        self.request = request
        self.question = question
        self.is_retry = is_retry
        self.brief = brief
        self.left_out = left_out
        self.id = uuid4().hex
        self.created = int(time.time())
        self.prompt_tokens: int | None = None  # None until the prompt is rendered
        self.deltas: list[Delta] = []
        self.delivered = False
        self.replies: list[RecordedReply] = []  # its recorded replies
        self.aborted = False  # no listener is left; its task may still be ending
        self.given_up = False  # aborted because its client disconnected
        self._listeners = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Future[Answer] | None = None

    @classmethod
    def answered_before(cls, call: ModelCall, answer: Answer) -> Self:
        """Return a call that an earlier process of this gateway answered."""
        running = cls(replace(call, messages=()))
        running.id, running.created, running.prompt_tokens = answer.id, answer.created, answer.prompt_tokens
        running.delivered = True  # assumed: the earlier process may have delivered it
        running.emit(_deltas_of(answer))
        running._task = asyncio.get_running_loop().create_future()
        running._task.set_result(answer)
        return running

    @property
    def task(self) -> asyncio.Future[Answer]:
        assert self._task is not None, "not started"
        return self._task

    @property
    def done(self) -> bool:
        return self.task.done()

    @property
    def answered(self) -> bool:
        task = self.task
        return task.done() and not task.cancelled() and task.exception() is None

    @property
    def abandoned(self) -> bool:
        """True if the call has an answer that was not delivered and no client waits for it."""
        return self.answered and not self._listeners and not self.delivered

    def start(self, work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        task = self._task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def set_prompt_tokens(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self._notify()

    def emit(self, deltas: Sequence[Delta]) -> None:
        if deltas:
            self.deltas += deltas
            self._notify()

    async def wait_for_more(self, known: int, timeout_s: float | None = None) -> bool:
        """Wait for more than `known` deltas or for the end of the call. Return False after a timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.deltas) <= known and not self.done:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def outcome(self) -> Answer:
        """Return the answer of a finished call, or raise its error."""
        if self.task.cancelled():
            raise session_closed("its calls were aborted")
        return self.task.result()

    def join(self) -> None:
        self._listeners += 1

    def leave(self, *, given_up: bool = False) -> bool:
        """Remove a listener. Return True if this was the last one, which aborts the call.

        `given_up` means that the client disconnected; otherwise the gateway stops, and the call may be repeated.
        """
        self._listeners -= 1
        self.given_up = given_up and not self._listeners
        if not self._listeners and self.answered:  # a later listener gets the answer as whole deltas
            self.deltas = _deltas_of(self.task.result())
        self.aborted = not self._listeners and self.task.cancel()
        return self.aborted

    def _ended(self, task: asyncio.Future[Answer]) -> None:
        self.call = replace(self.call, messages=())
        if not task.cancelled():
            task.exception()  # mark the exception as retrieved, in case there is no listener
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _deltas_of(answer: Answer) -> list[Delta]:
    return [
        delta
        for i, choice in enumerate(answer.choices)
        for delta in whole_deltas(choice.message, i, choice.logprobs or ())
    ]
