"""Call the agent's function, and other blocking work, in daemon threads.

Invariants:

- a call never blocks the server. A sync function runs in a separate daemon thread; async functions share one event
  loop in another daemon thread. A blocked agent therefore delays no ping, deadline or shutdown;
- each call settles exactly once, as `Returned` or `Raised`.
"""

import asyncio
import contextlib
import contextvars
import inspect
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, TypeVar

from agent_wrapper.context import RolloutContext
from agent_wrapper.errors import EntrypointError

_T = TypeVar("_T")


@dataclass(frozen=True)
class Returned:
    value: object


@dataclass(frozen=True)
class Raised:
    error: BaseException


class AgentCall:
    """A call of the agent's function. `future` holds its result."""

    def __init__(self) -> None:
        self.future: Future[Returned | Raised] = Future()

    def cancel(self) -> bool:
        """Cancel the agent. Return False for a sync function, which cannot be cancelled and is abandoned."""
        return False

    def _settle(self, result: Returned | Raised) -> None:
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(result)


class Agent:
    """The entrypoint function. It takes one `RolloutContext` and is sync or async."""

    def __init__(self, function: Callable[[RolloutContext], Any]) -> None:
        """Raise EntrypointError if the function is not a valid entrypoint."""
        name = getattr(function, "__qualname__", repr(function))
        if not callable(function):
            raise EntrypointError(f"the entrypoint must be a function, not {name}: use @app.entrypoint without ()")
        target = inspect.unwrap(function)
        if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
            raise EntrypointError(f"{name} yields; an entrypoint must return its reward once, at its end")
        try:
            signature = inspect.signature(function)
            signature.bind(object())
        except TypeError:
            raise EntrypointError(
                f"{name}{signature} must take exactly one argument, the RolloutContext: def {name}(context): ..."
            ) from None
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  (an object whose __call__ is async)
        )
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, context: RolloutContext) -> "_SyncCall | _AsyncCall":
        if self._is_async:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_forever, args=[self._loop], name="agents", daemon=True).start()
            return _AsyncCall(self._function, context, self._loop)
        return _SyncCall(self._function, context)


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop of all async agents. A SystemExit in a task that an agent created would end it, or `stop`."""
    while not loop.is_closed():
        with contextlib.suppress(BaseException):
            loop.run_forever()


class _SyncCall(AgentCall):
    def __init__(self, function: Callable[[RolloutContext], Any], context: RolloutContext) -> None:
        super().__init__()
        variables = contextvars.copy_context()
        self._thread = threading.Thread(
            target=lambda: self._settle(variables.run(_outcome_of, function, context)),
            name=f"agent-{context.rollout_id}",
            daemon=True,
        )
        self._thread.start()

    def stack(self) -> str:
        """Return a traceback of where the agent runs or was cancelled; "" if unknown."""
        return _thread_stack(self._thread.ident)


class _AsyncCall(AgentCall):
    def __init__(
        self,
        function: Callable[[RolloutContext], Any],
        context: RolloutContext,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__()
        self._loop = loop
        self._loop_thread: int | None = None
        self._task: asyncio.Task[None] | None = None
        loop.call_soon_threadsafe(self._begin, function, context)

    def _begin(self, function: Callable[[RolloutContext], Any], context: RolloutContext) -> None:
        self._loop_thread = threading.get_ident()
        self._task = self._loop.create_task(self._run(function, context))
        # A task that is cancelled before its first step never reaches the code that settles it.
        self._task.add_done_callback(lambda _: self._settle(Raised(asyncio.CancelledError())))

    async def _run(self, function: Callable[[RolloutContext], Any], context: RolloutContext) -> None:
        try:
            self._settle(Returned(await function(context)))
        except BaseException as error:
            self._settle(_raised(error))

    def cancel(self) -> bool:
        # Scheduled after _begin, so the task exists.
        self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())
        return True

    def stack(self) -> str:
        if not self.future.done():
            # Despite the cancellation, it still runs: most likely it blocks its loop's thread.
            return _thread_stack(self._loop_thread)
        result = self.future.result()
        return traceback_of(result.error) if isinstance(result, Raised) else ""


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an agent's error. Formatting the error's objects may fail."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:
        return "".join([*traceback.format_tb(error.__traceback__), type(error).__name__])


def _outcome_of(function: Callable[[RolloutContext], Any], context: RolloutContext) -> Returned | Raised:
    try:
        value = function(context)
        if inspect.isawaitable(value):
            # A decorator may hide an async function.
            value = asyncio.run(_await(value))
    except BaseException as error:
        return _raised(error)
    return Returned(value)


def _raised(error: BaseException) -> Raised:
    """Drop the wrapper's frame, so that the traceback starts in the agent's code."""
    return Raised(error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None))


async def _await(value: Any) -> Any:
    return await value


def _thread_stack(ident: int | None) -> str:
    frame = sys._current_frames().get(ident) if ident is not None else None
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
