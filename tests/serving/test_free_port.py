"""A port for a server that is not there yet must still be free when it comes."""

import socket
import sys
from pathlib import Path

import pytest

from rollout_backend import process
from rollout_backend.process import free_port


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells its range on Linux alone")
def test_the_kernel_gives_it_to_nobody_meanwhile():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert low > process.SERVER_PORTS.start + 1000, "this machine's kernel leaves us none"
    assert not [port for port in (free_port() for _ in range(100)) if low <= port <= high]


def test_a_taken_one_is_passed_over(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        monkeypatch.setattr(process.random.SystemRandom, "sample", lambda self, among, count: [number] * count)
        assert free_port() != number


def test_where_the_kernel_gives_all_of_them(monkeypatch):
    monkeypatch.setattr(process, "_lowest_given_by_the_kernel", lambda: 1024)
    assert free_port() > 0
