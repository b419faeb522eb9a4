"""Let long work in a thread give way to other work of the same thread, between its parts."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_give_way: ContextVar[Callable[[], object] | None] = ContextVar("give_way", default=None)


@contextlib.contextmanager
def giving_way(to_others: Callable[[], object] | None) -> Iterator[None]:
    """Within the context, `let_others_go_first` calls `to_others`."""
    token = _give_way.set(to_others)
    try:
        yield
    finally:
        _give_way.reset(token)


def let_others_go_first() -> None:
    """Let this thread do other work that goes first.

    Call it after each string, image or reply. The other work may run the same code for another session, so the caller
    must not be changing what both use.
    """
    if (give_way := _give_way.get()) is not None:
        give_way()
