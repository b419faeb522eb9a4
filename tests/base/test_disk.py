"""A disk that does not answer delays callers for a limited time, and never the event loop."""

import asyncio
import threading

import pytest

from rollout_backend.base import disk
from rollout_backend.base.disk import Disk, call_disk


@pytest.fixture
def free():
    """Let the calls of the disk return."""
    free = threading.Event()
    yield free
    free.set()


async def test_only_the_first_caller_waits_for_a_disk_that_hangs(tmp_path, free, monkeypatch, caplog):
    monkeypatch.setattr(disk, "DISK_S", 0.05)
    hung, made = Disk(tmp_path), []

    def call(name):
        assert free.wait(120)
        made.append(name)

    with pytest.raises(TimeoutError, match="timed out"):
        await hung.call(call, "first")
    monkeypatch.setattr(disk, "DISK_S", 3600)
    with pytest.raises(TimeoutError):
        await hung.call(call, "second")
    assert not await hung.wait(hung.submit(call, "third"))
    assert caplog.text.count("has not answered for") == 1
    free.set()
    await asyncio.wrap_future(hung.submit(call, "fourth"))
    assert await hung.call(len, "abc") == 3, "once the disk answers, callers wait again"
    assert made == ["first", "second", "third", "fourth"]


async def test_errors_of_calls_are_raised_or_logged(tmp_path, caplog):
    calls = Disk(tmp_path)
    with pytest.raises(FileNotFoundError):
        await calls.call((tmp_path / "none").read_bytes)
    assert "has failed" not in caplog.text
    assert await calls.wait(calls.submit((tmp_path / "none").read_bytes))
    assert f"a call of the disk of {tmp_path} has failed" in caplog.text


async def test_a_single_call_ends_in_time(free):
    with pytest.raises(TimeoutError, match="timed out"):
        await call_disk(lambda: free.wait(120), 0.05)
    assert await call_disk(lambda: 1) == 1
