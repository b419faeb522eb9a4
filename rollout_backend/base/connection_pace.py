"""Let new connections wait for their turn, because to accept one and to read its first head takes CPU time.

Invariants:

- Connections without a known key use `_BURST_S` of CPU time at once, and `_RATE` of a core in the long run. A waiting
  connection has no transport: it takes some 30 us to accept, and that is limited to a tenth of a core.
- A connection whose first bytes contain a known key does not wait, or its cost is not counted.
- Client addresses take turns. The newest connection of an address goes first, because its client is the least likely
  to have given up.
- A connection waits for `_WAIT_S` at most. `WaitingConnections` limits the number of those that wait, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial

from rollout_backend.base.logs import report_failure
from rollout_backend.base.waiting_connections import WaitingConnections, WatchedProtocol

_BURST_S, _RATE = 0.1, 0.05
# CPU time from the accepted connection to the first byte of its head; with an RSA key of 4096 bits it is 4 ms.
_PLAIN_S, _TLS_S = 0.0005, 0.0015
# While connections wait, more are accepted in batches, with pauses that are at least nine times as long as a batch.
_BATCH, _MIN_PAUSE_S, _PAUSES = 64, 0.01, 9
_OUT_OF_FILES_S = 1.0
# With half of the rate, 4,000 sessions that connected at once with TLS needed 61 s on a busy machine, and 52 s
# without turns.
_WAIT_S = 300.0
# The key is in the first packet of all clients that were looked at.
_LOOK_BYTES = 4096


class PacedProtocol(WatchedProtocol):
    """A protocol that charges the cost of its first head to `pace`. List it before the server's class as a base."""

    pace: ConnectionPace | None = None
    """None if the cost is not counted, or no longer."""


class _Waiting:
    """A connection that waits for its turn."""

    def __init__(self, accepted: socket.socket, address: bytes, abort: Callable[[_Waiting], None]) -> None:
        self.socket, self.address = accepted, address
        self.abort = partial(abort, self)


class ConnectionPace:
    """The new connections of one server."""

    def __init__(
        self,
        waiting: WaitingConnections,
        protocol: Callable[[], PacedProtocol],
        is_known: Callable[[bytes], bool],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`is_known` returns whether the first bytes of a head contain the key of a session that owes nothing."""
        self._waiting, self._protocol, self._is_known, self._tls = waiting, protocol, is_known, tls
        self._listening: list[socket.socket] = []
        self._queues: dict[bytes, dict[_Waiting, None]] = {}
        self._used_s, self._at = 0.0, time.monotonic()
        # CPU time for connections that wait, since the last batch.
        self._spent_s = 0.0
        self._turn: asyncio.TimerHandle | None = None
        self._starting: set[asyncio.Task[None]] = set()

    def listen(self, server: asyncio.Server) -> None:
        """Accept the server's connections in place of asyncio, which accepts any number at once."""
        for each in server.sockets:
            asyncio.get_running_loop().remove_reader(each.fileno())
            self._listening.append(each.dup())
            self._resume(self._listening[-1])

    def close(self) -> None:
        """Close the connections that wait, and accept no more."""
        for each in self._listening:
            asyncio.get_running_loop().remove_reader(each)
            each.close()
        for queue in [*self._queues.values()]:
            for waiting in [*queue]:
                self._drop(waiting)

    def recognizes(self, head: bytes) -> bool:
        """Return whether a connection that was counted begins with a known key. Its cost is then not counted."""
        if self._used() < _BURST_S / 2 or not self._is_known(head):
            return False
        self.charge(-self._cost_s)
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
            self._plan_turn()
        return True

    def charge(self, seconds: float) -> None:
        self._used_s = max(0.0, self._used() + seconds)

    @property
    def _cost_s(self) -> float:
        return _PLAIN_S if self._tls is None else _TLS_S

    def _used(self) -> float:
        now = time.monotonic()
        self._used_s = max(0.0, self._used_s - _RATE * (now - self._at))
        self._at = now
        return self._used_s

    # --- accept -----------------------------------------------------------------------------------------------

    def _resume(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        began_s, pause_s, some_wait = time.thread_time(), 0.0, False
        for _ in range(_BATCH):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError:
                pause_s = _OUT_OF_FILES_S
                break
            accepted.setblocking(False)
            if self._queues or self._used() >= _BURST_S:
                self._admit(accepted, address[0])
                some_wait = True
            else:
                self._start(accepted)
        if some_wait:
            self._spent_s += time.thread_time() - began_s
            pause_s = max(pause_s, _MIN_PAUSE_S, _PAUSES * self._spent_s)
        self._spent_s = 0.0
        if pause_s:
            loop = asyncio.get_running_loop()
            loop.remove_reader(listening)
            loop.call_later(pause_s, self._resume, listening)

    def _admit(self, accepted: socket.socket, host: str) -> None:
        head = _peek(accepted)
        if head == b"":
            accepted.close()
        elif head is not None and self._is_known(head):
            self._start(accepted, counts=False)
        else:
            waiting = _Waiting(accepted, _subnet(host), self._drop)
            self._queues.setdefault(waiting.address, {})[waiting] = None
            self._waiting.opened(waiting, _WAIT_S)
            if head is None and accepted.fileno() >= 0:
                asyncio.get_running_loop().add_reader(accepted, self._look, waiting)
            self._plan_turn()

    def _look(self, waiting: _Waiting) -> None:
        """Look at the first bytes of a connection that waits."""
        began_s = time.thread_time()
        head = _peek(waiting.socket)
        if head == b"":
            self._drop(waiting)
        elif head is not None and self._is_known(head):
            self._start(self._leave(waiting), counts=False)
        elif head is not None:
            asyncio.get_running_loop().remove_reader(waiting.socket)
        self._spent_s += time.thread_time() - began_s

    def _leave(self, waiting: _Waiting) -> socket.socket:
        queue = self._queues[waiting.address]
        del queue[waiting]
        if not queue:
            del self._queues[waiting.address]
        self._waiting.closed(waiting)
        asyncio.get_running_loop().remove_reader(waiting.socket)
        return waiting.socket

    def _drop(self, waiting: _Waiting) -> None:
        self._leave(waiting).close()

    # --- turns ------------------------------------------------------------------------------------------------

    def _plan_turn(self) -> None:
        if self._turn is None and self._queues:
            wait_s = max(0.0, self._used() - _BURST_S) / _RATE
            self._turn = asyncio.get_running_loop().call_later(wait_s, self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        if self._queues and self._used() <= _BURST_S:
            address = next(iter(self._queues))
            # The next turn is another address's.
            queue = self._queues[address] = self._queues.pop(address)
            self._start(self._leave(next(reversed(queue))))
        self._plan_turn()

    def _start(self, accepted: socket.socket, *, counts: bool = True) -> None:
        protocol = self._protocol()
        if counts:
            self.charge(self._cost_s)
            protocol.pace = self
        task = asyncio.get_running_loop().create_task(self._connect(accepted, protocol))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        task.add_done_callback(report_failure("a new connection"))

    async def _connect(self, accepted: socket.socket, protocol: PacedProtocol) -> None:
        # The client may be gone, or fail the handshake.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, accepted, ssl=self._tls)


def _peek(accepted: socket.socket) -> bytes | None:
    """Return the first bytes without consuming them: none if the client has closed, None if nothing has arrived."""
    try:
        return accepted.recv(_LOOK_BYTES, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _subnet(host: str) -> bytes:
    """Return the address; of an IPv6 address, the /64 network, because one machine may have all of its addresses."""
    if ":" in host:
        return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8]
    return host.encode()
