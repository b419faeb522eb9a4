"""Send new weights over a gloo group of the trainer's process and one SGLang server, without a file.

Invariants:

- Each load creates a new group with one server, so a lost server fails alone, and a restarted one is in no old group.
- The group's port listens only on the address at which the server reaches this process, and only during the load.
- torch is imported only when tensors are sent.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import socket
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rollout_backend.errors import ServingError

if TYPE_CHECKING:
    import torch

Post = Callable[[str, Mapping[str, object]], Awaitable[None]]
"""Post a JSON body to a path of the server. Raises ServingError unless it succeeds."""

_JOIN_S = 60.0
_BUCKET_BYTES = 512 * 2**20


async def send_tensors(
    post: Post,
    url: str,
    version: str,
    tensors: Mapping[str, torch.Tensor],
    ranks: int,
    timeout_s: float,
) -> None:
    """Replace the weights of an SGLang server of `ranks` processes, and flush its cache. Nothing may run on it.

    Raises:
        ServingError: the server did not join the group within 60 s or half of `timeout_s`, or did not load the
            tensors. It may now have some of them.
    """
    join_s = min(_JOIN_S, timeout_s / 2)
    sender = await asyncio.to_thread(_Sender, url, tensors, ranks, timeout_s)
    sender.start()
    group = {"group_name": sender.name}
    joining = {**group, "rank_offset": 1, "world_size": 1 + ranks, "backend": "gloo"}
    try:
        try:
            async with asyncio.timeout(join_s):
                await post(
                    "/init_weights_update_group",
                    {**joining, "master_address": sender.address, "master_port": sender.port},
                )
        except TimeoutError:
            raise ServingError(
                f"it did not join a gloo group at {sender.address}:{sender.port} within {join_s:g} s: can it connect "
                "to this machine? GLOO_SOCKET_IFNAME names the network interface"
            ) from None
        await post("/begin_weight_update", {})
        for number, bucket in enumerate(sender.buckets, start=1):
            last = number == len(sender.buckets)
            labels = {"weight_version": version} if last else {}
            description = {
                "names": [name for name, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
            }
            await post(
                "/update_weights_from_distributed",
                {**group, **description, **labels, "load_format": "flattened_bucket", "flush_cache": last},
            )
        await post("/end_weight_update", {})
        await post("/destroy_weights_update_group", group)
    except ServingError as error:
        raise ServingError(f"{error}{sender.failure}") from None
    finally:
        sender.close()


class _Sender:
    """Rank 0 of a group, in a thread. It joins, and broadcasts each bucket in the order of the server's requests.

    The thread ends when it has sent everything, when the server is lost, when this object is closed before the server
    has joined, or after `timeout_s`. The connections stay open while this object exists, because the server may still
    have to read from them.
    """

    def __init__(self, url: str, tensors: Mapping[str, torch.Tensor], ranks: int, timeout_s: float) -> None:
        from torch.distributed import TCPStore

        server = urlsplit(url)
        assert server.hostname is not None
        try:
            with socket.create_connection((server.hostname, server.port or 80), timeout_s) as connection:
                self.address: str = connection.getsockname()[0]
                listener = socket.create_server((self.address, 0), family=connection.family)
        except OSError as error:
            raise ServingError(f"it does not accept connections: {error}") from None
        self.port: int = listener.getsockname()[1]
        self.name = f"rollout-{uuid.uuid4().hex}"
        self.buckets = list(_buckets(tensors))
        self._world = 1 + ranks
        self._timeout = datetime.timedelta(seconds=timeout_s)
        create = functools.partial(
            TCPStore, self.address, self.port, self._world, timeout=self._timeout, wait_for_workers=False
        )
        self._store: object = create(is_master=True, master_listen_fd=listener.detach())
        self._client = create(is_master=False)
        self._group: object = None
        self._failure = ""

    def start(self) -> None:
        threading.Thread(target=self._run, name=self.name, daemon=True).start()

    @property
    def failure(self) -> str:
        """Why this side of the group failed, to append to a message; empty if it has not."""
        return f" (the group of this process: {self._failure})" if self._failure else ""

    def close(self) -> None:
        """End a thread that still waits for the server: if it did so at the end of the process, that would abort."""
        self._store = None

    def _run(self) -> None:
        try:
            self._send()
        except RuntimeError as error:
            self._failure = str(error)
            self._group = self._store = None  # closed, so that the server's side fails too

    def _send(self) -> None:
        import torch
        from torch.distributed import PrefixStore, ProcessGroupGloo

        # The keys under which SGLang's `init_custom_process_group` joins a group. That function itself would add the
        # group to those of the trainer's process.
        store = PrefixStore("cpu/", PrefixStore(f"{self.name}/", PrefixStore(self.name, self._client)))
        self._group = group = ProcessGroupGloo(store, 0, self._world, self._timeout)
        for bucket in self.buckets:
            flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in bucket])
            group.broadcast(flat, 0).wait()


def _buckets(tensors: Mapping[str, torch.Tensor]) -> Iterator[Sequence[tuple[str, torch.Tensor]]]:
    """Yield the tensors in buckets of 512 MiB, or of one larger tensor.

    The widest elements come first, because the server refuses a tensor that is not aligned to its element size.
    """
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in sorted(tensors.items(), key=lambda named: -named[1].element_size()):
        if bucket and size + tensor.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
