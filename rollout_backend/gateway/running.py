"""One model call under way: what it has said so far, and who listens.

What must always hold: everybody who listens is told everything from the start. A call that nobody listens to any more
is aborted, and one that is answered keeps its answer, but not what it was asked: each call repeats all before it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Self
from uuid import uuid4

from rollout_backend.gateway.call import Answer, Delta, ModelCall
from rollout_backend.gateway.errors import session_closed
from rollout_backend.gateway.increments import at_once


class Running:
    """Listeners `join`, and `leave` with whether they got the answer."""

    def __init__(self, call: ModelCall, request: bytes = b"") -> None:
        """`request` is what a repetition is known by."""
        self.call = call
        self.request = request
        self.id = uuid4().hex
        self.created = int(time.time())
        self.prompt_tokens: int | None = None  # known once it is rendered
        self.deltas: list[Delta] = []
        self.delivered = False
        self._listeners = 0
        self._news = asyncio.Event()
        self._task: asyncio.Future[Answer] | None = None

    @classmethod
    def answered_before(cls, call: ModelCall, answer: Answer) -> Self:
        """A call that an earlier process of this gateway has answered."""
        running = cls(replace(call, messages=()))
        running.id, running.created, running.prompt_tokens = answer.id, answer.created, answer.prompt_tokens
        running.delivered = True  # as far as is known
        running.say(_told_at_once(answer))
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
        """Whether it has an answer that nobody got, and nobody waits for."""
        return self.answered and not self._listeners and not self.delivered

    def start(self, work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        task = self._task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def rendered(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self._tell()

    def say(self, deltas: Sequence[Delta]) -> None:
        if deltas:
            self.deltas += deltas
            self._tell()

    async def news(self, heard: int, timeout_s: float | None = None) -> bool:
        """Waits for more than the `heard` deltas, or the end; False if neither came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.deltas) <= heard and not self.done:
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    def outcome(self) -> Answer:
        """The answer of a call that is done. Raises what it failed with."""
        if self.task.cancelled():
            raise session_closed("its calls were aborted")
        return self.task.result()

    def join(self) -> None:
        self._listeners += 1

    def leave(self, delivered: bool = False) -> bool:
        """Whether the call was aborted, as nobody listens to it any more."""
        self._listeners -= 1
        self.delivered |= delivered
        if not self._listeners and self.answered:  # whoever comes now is told all at once
            self.deltas = _told_at_once(self.task.result())
        return not self._listeners and self.task.cancel()

    def _ended(self, task: asyncio.Future[Answer]) -> None:
        self.call = replace(self.call, messages=())
        if not task.cancelled():
            task.exception()  # has been seen, also if nobody listens
        self._tell()

    def _tell(self) -> None:
        told, self._news = self._news, asyncio.Event()
        told.set()


def _told_at_once(answer: Answer) -> list[Delta]:
    return [delta for i, choice in enumerate(answer.choices) for delta in at_once(choice.message, i)]
