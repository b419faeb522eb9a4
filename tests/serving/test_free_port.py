"""A port for a server must still be free when the server starts."""

import socket
import sys
from pathlib import Path

import pytest

from rollout_backend.serving import server_process
from rollout_backend.serving.server_process import free_port


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's port range is known on Linux only")
def test_free_port_is_outside_the_ephemeral_range():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert low > server_process.SERVER_PORTS.start + 1000, "this machine's kernel leaves us none"
    assert not [port for port in (free_port() for _ in range(100)) if low <= port <= high]


def test_taken_port_is_skipped(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        monkeypatch.setattr(server_process.random.SystemRandom, "sample", lambda self, among, count: [number] * count)
        assert free_port() != number


def test_port_is_not_returned_twice_before_it_is_in_use(monkeypatch):
    monkeypatch.setattr(server_process, "_drawn", set())
    drawn = [free_port() for _ in range(80)]
    assert len(set(drawn)) == len(drawn)


def test_ephemeral_port_is_returned_if_every_port_is_ephemeral(monkeypatch):
    monkeypatch.setattr(server_process, "_first_ephemeral_port", lambda: 1024)
    assert free_port() > 0
