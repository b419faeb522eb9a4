"""Keys of a terminal: a pseudoterminal stands for it."""

import asyncio
import os
import pty
import signal
import sys
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest

from rollout_backend.core.ledger import Phase
from rollout_backend.model.serving.model_serving import RunPhase
from rollout_backend.run.accounts.progress import Progress
from rollout_backend.views.terminal.keys import Keys, restore_terminals
from rollout_backend.views.terminal.run_output import RunOutput


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    """Yield the end of a user, and the end of a program."""
    user, program = pty.openpty()
    with os.fdopen(program) as stream:
        yield user, stream
    os.close(user)


def mode(stream: TextIO) -> int:
    return termios.tcgetattr(stream)[3] & (termios.ICANON | termios.ECHO)


async def test_keys_arrive_one_by_one_and_the_terminal_gets_its_mode_back(terminal):
    user, stream = terminal
    before = mode(stream)
    pressed: asyncio.Queue[str] = asyncio.Queue()
    keys = Keys(pressed.put_nowait, stream)
    keys.start()
    assert keys.reading
    assert mode(stream) == 0
    os.write(user, b"df\xff")
    async with asyncio.timeout(120):
        assert [await pressed.get(), await pressed.get()] == ["d", "f"]
    keys.stop()
    keys.stop()
    assert not keys.reading
    assert mode(stream) == before


async def test_an_exit_without_clean_up_restores_the_terminal(terminal):
    _, stream = terminal
    before = mode(stream)
    keys = Keys(lambda key: None, stream)
    keys.start()
    restore_terminals()
    assert mode(stream) == before
    keys.stop()


async def test_a_terminal_that_was_closed_ends_the_reading(terminal):
    user, stream = terminal
    keys = Keys(lambda key: None, stream)
    keys.start()
    os.dup2(sys.__stderr__.fileno(), user)  # which closes the user's end
    keys.stop()
    assert not keys.reading


async def test_the_keys_of_a_run(terminal, make_screen, monkeypatch):
    user, stream = terminal
    monkeypatch.setattr(sys, "stdin", stream)
    screen, loop, interrupts = make_screen(True), asyncio.get_running_loop(), asyncio.Queue[None]()
    loop.add_signal_handler(signal.SIGINT, interrupts.put_nowait, None)
    read = asyncio.Event()

    async def progress() -> Progress:
        read.set()
        return Progress({**dict.fromkeys(Phase, 0), Phase.RUNNING: 1}, {}, 1, None)

    output = RunOutput(screen.console)
    output.phase(RunPhase.ROLLOUTS)
    try:
        async with asyncio.timeout(120), output.watch(progress):
            await read.wait()
            os.write(user, b"dfqq")
            await interrupts.get()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    assert interrupts.empty()
    assert "f failures   q stop" in screen.text
    assert "no rollout has failed" in screen.text
    assert "gateway  does not answer" in screen.text
