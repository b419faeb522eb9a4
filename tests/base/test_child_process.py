"""What a child process of ours is given, and what is left of it."""

import asyncio
import threading
from pathlib import Path

import pytest

from rollout_backend.base.child_process import open_log

HANG_S = 60


async def test_a_log_that_is_opened_for_a_caller_that_was_cancelled_is_closed(tmp_path, monkeypatch):
    opening, may_open, threads, opened, open_file = threading.Event(), threading.Event(), [], [], Path.open

    def late(path, mode="r"):
        # Threads of other tests open their own files.
        if path.parent != tmp_path:
            return open_file(path, mode)
        threads.append(threading.current_thread())
        opening.set()
        assert may_open.wait(HANG_S)
        opened.append(open_file(path, mode))
        return opened[-1]

    monkeypatch.setattr(Path, "open", late)
    caller = asyncio.create_task(open_log(tmp_path / "log"))
    assert await asyncio.to_thread(opening.wait, HANG_S)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    may_open.set()
    threads[0].join(HANG_S)
    assert [file.closed for file in opened] == [True]
