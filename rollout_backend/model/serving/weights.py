"""Keep track of the newest weights of a run, and load them into the engines.

Invariants:

- A version permanently names one set of weights of a run, even after a restart of the trainer. 0 names `model.path`.
- Only weights with exactly the names and shapes of the model reach an engine. SGLang crashes on a wrong shape, and
  silently keeps the old value of a missing tensor. Tensors must be finite: NaN makes an engine exit or sample noise.
- The newest weights stay on disk, or in memory (`serving.weight_transfer` is `gloo`), until newer ones are committed,
  because a restarted engine loads them again.
- Tensors in memory are sent over a gloo group of this process and one server, new for each load: a lost server fails
  alone, and a restarted one is in no old group. Its port listens only on the address at which the server reaches this
  process, and only during the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import hashlib
import json
import logging
import shutil
import socket
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from safetensors import SafetensorError, safe_open

from agent_wrapper.shared.threads import in_thread
from rollout_backend.base.addresses import host_port
from rollout_backend.base.atomic_file import write_file
from rollout_backend.base.disk import call_disk
from rollout_backend.config import RolloutConfig, ServingConfig
from rollout_backend.errors import ConfigError, ServingError, WeightsMismatch
from rollout_backend.model.serving.engine import PROBE, control_client
from rollout_backend.model.serving.local_engine import weight_bytes

# A manager whose trainer is another process does not need torch.
if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_MESSAGE_CHARS = 500
# Tensors are sent in buckets of this size.
_BUCKET_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Weights:
    """A model folder, tensors in memory, or weights of a training service, and the version that their tokens carry.

    `digest` covers the names, sizes and times of the folder's files. `sampler` is the path of a service's weights.
    """

    version: int
    folder: Path | None
    digest: str = ""
    sampler: str = ""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, version: int, folder: Path) -> Weights:
        return cls(version, folder, _digest(folder))

    def check_unchanged(self) -> None:
        """Raise ServingError if the folder was modified or deleted since."""
        if self.folder is not None and _digest(self.folder) != self.digest:
            raise ServingError(
                f"{self.folder} has changed or is gone since it became version {self.version} of the weights: save "
                "each checkpoint to its own folder, and keep it while its weights are the newest"
            )

    async def check(self) -> int:
        """Check that the folder is unchanged, and return its size in bytes, without blocking the event loop.

        Raises:
            ServingError: the folder has changed, or its disk did not answer within `disk.DISK_S`.
        """

        def read() -> int:
            self.check_unchanged()
            return self.size()

        try:
            return await call_disk(read)
        except TimeoutError as error:
            raise ServingError(f"{self.folder} cannot be read, because its disk hangs: {error.strerror}") from None

    def size(self) -> int:
        """Return the number of bytes."""
        if self.folder is not None:
            return weight_bytes(self.folder)
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class WeightUpdate:
    """Result of `RolloutManager.update_weights`.

    `failed` maps each engine that did not load the weights to the reason. Such an engine is restarted, and gets
    requests once it has loaded them. `paused_s` is the time in which the engines did not sample.
    """

    version: int
    failed: Mapping[str, str]
    paused_s: float


class WeightStore:
    """The newest weights of a run. `current` is None until the first update."""

    def __init__(self, config: RolloutConfig) -> None:
        """Read which weights an earlier trainer of this run committed.

        Raises:
            ConfigError: they are missing, changed or for another model, or the record of them cannot be read.
        """
        self._model = config.model
        self._dtype = config.serving.dtype
        self._in_memory = config.serving.weight_transfer == "gloo"
        self._at_service = config.serving.kind == "tinker"
        shared = config.serving.weights_dir
        self._folder = (shared / config.run_id if shared is not None else config.run_dir / "weights").absolute()
        self._file = config.run_dir / "weights.json"
        self._last, self.current = self._read()

    def prepare(self, source: Path | str | Mapping[str, torch.Tensor]) -> Weights:
        """Check new weights against the model, and write tensors to a folder, or copy them. Blocks.

        Raises:
            ConfigError: the folder is not a model folder with safetensors, or `serving.kind` takes other weights.
            WeightsMismatch: names or shapes differ from the model's, or tensors are not finite; nothing was written.
            ServingError: the tensors could not be written.
        """
        version = self._last + 1
        if isinstance(source, str) != self._at_service:
            raise ConfigError(
                "update_weights takes the path of a training service's weights, a string, with serving.kind=tinker, "
                "and only there"
            )
        if isinstance(source, str):
            return Weights(version, None, sampler=source)
        model = ModelFolder(self._model.weight_folder)
        if isinstance(source, Path):
            weights = Weights.of(version, source.absolute())
            model.check(ModelFolder(source).shapes)
            return weights
        if self._in_memory:
            return Weights(version, None, tensors=model.copies(source, self._dtype))
        # A thread whose caller was cancelled may still write its part.
        folder, part = self._folder / str(version), self._folder / f".{version}.{uuid.uuid4().hex}"
        try:
            for leftover in (folder, *self._folder.glob(f".{version}.*")):
                shutil.rmtree(leftover, ignore_errors=True)
            part.mkdir(parents=True)
            model.write(source, part, self._dtype)
            part.rename(folder)
        except OSError as error:
            raise ServingError(
                f"the new weights could not be written to {part} ({error}): free space, or set serving.weights_dir"
            ) from None
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return Weights.of(version, folder)

    async def commit(self, weights: Weights) -> None:
        """Record these weights as the newest. Raises ServingError if that fails."""
        folder = str(weights.folder) if weights.folder is not None else None
        record = {
            "version": weights.version,
            "folder": folder,
            "digest": weights.digest,
            "sampler": weights.sampler,
        }
        try:
            await call_disk(lambda: write_file(self._file, json.dumps(record).encode()))
        except OSError as error:
            raise ServingError(f"the new weights could not be recorded in {self._file}: {error}") from None
        self._last, self.current = weights.version, weights

    def prune(self) -> None:
        """Delete the folders that this class wrote, except for the newest weights, as far as the disk permits it."""
        with contextlib.suppress(OSError):
            for folder in self._folder.iterdir():
                version = folder.name.lstrip(".").partition(".")[0]
                if version.isdecimal() and (self.current is None or folder != self.current.folder):
                    shutil.rmtree(folder, ignore_errors=True)

    def _read(self) -> tuple[int, Weights | None]:
        """Return the last version of this run, and its weights unless they were only in memory."""
        try:
            record = json.loads(self._file.read_text())
            version, folder, digest = int(record["version"]), record["folder"], str(record["digest"])
            weights = Weights(
                version, Path(folder) if folder is not None else None, digest, record.get("sampler", "")
            )
        except (FileNotFoundError, NotADirectoryError):
            return 0, None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{self._file} cannot be read ({error}), so it is unknown which weights this run served last: "
                "restore it, or use a new run_id"
            ) from None
        if bool(weights.sampler) != self._at_service:
            raise ConfigError(
                f"this run served version {version} of its weights with another serving.kind: set that again, or "
                "another run_id"
            )
        if weights.sampler:
            return version, weights
        if weights.folder is None:
            log.warning(
                "version %d of the weights was only in the memory of an earlier trainer: the engines serve version "
                "0, which is model.path, until the next update_weights",
                version,
            )
            return version, None
        if not weights.folder.is_dir():
            raise ConfigError(
                f"this run served version {weights.version} of its weights from {weights.folder}, which is gone: "
                "restore the folder, or use a new run_id"
            )
        try:
            weights.check_unchanged()
            ModelFolder(self._model.weight_folder).check(ModelFolder(weights.folder).shapes)
        except (ServingError, WeightsMismatch) as error:
            raise ConfigError(f"this run cannot serve its newest weights again, use a new run_id: {error}") from None
        return version, weights


async def load_weights(url: str, weights: Weights, serving: ServingConfig, bucket_bytes: int = _BUCKET_BYTES) -> None:
    """Make an SGLang server load these weights and flush its cache. No request may be running on it.

    Raises:
        ServingError: the server did not load them, and may now have any weights: SGLang 0.5.23 restores them from the
            folder that it failed to load.
    """
    version = str(weights.version)
    timeout_s = serving.startup_s(await weights.check())
    async with control_client("load new weights", timeout_s) as http:

        async def post(path: str, body: Mapping[str, object]) -> None:
            async with http.post(url + path, json=body) as reply:
                text = await reply.text(errors="replace")
            if reply.status != 200 or _fields(text).get("success") is not True:
                raise ServingError(f"it answered {reply.status} to new weights: {text[:_MESSAGE_CHARS]}")

        if weights.folder is not None or weights.sampler:
            path = weights.sampler or str(weights.folder)
            source = {"model_path": path, "weight_version": version, "flush_cache": True}
            await post("/update_weights_from_disk", source)
        else:
            await send_tensors(post, url, version, weights.tensors, serving.tensor_parallel, timeout_s, bucket_bytes)
        async with http.get(url + PROBE) as reply:
            reported = _fields(await reply.text(errors="replace")).get("weight_version")
    if reported != version:
        raise ServingError(f"it reports version {reported!r} of its weights after loading {version}")
    await weights.check()


def _fields(text: str) -> Mapping[str, object]:
    """Return the fields of an answer; none if it is not a JSON object."""
    try:
        answer = json.loads(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _digest(folder: Path) -> str:
    """Return a digest of the weight files; empty if there are none."""
    try:
        stats = sorted((file.name, file.stat()) for file in folder.glob("*.safetensors*"))
    except OSError:
        # A file was deleted in the meantime.
        return ""
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.blake2b(json.dumps(files).encode(), digest_size=16).hexdigest()


_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf", ".pt", ".pth")
_OUTPUT = "lm_head.weight"
_NAMED = 5

Shape = tuple[int, ...]


def tensor_shapes(file: Path) -> dict[str, Shape]:
    """Return the shape of each tensor in a safetensors file. Raises ConfigError if it cannot be read."""
    try:
        with safe_open(file, framework="np") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): is it still being written?") from None


class ModelFolder:
    """A model folder, which is also the template for folders with newer weights.

    It reads the names and shapes of the tensors in `path`, but not the tensors themselves.

    Raises:
        ConfigError: `path` is not a model folder, or has no complete safetensors.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path).absolute()
        try:
            config = json.loads((path / "config.json").read_text())
        except OSError as error:
            raise ConfigError(f"{path} is not a model folder: {error.strerror} for config.json") from None
        except ValueError as error:
            raise ConfigError(f"{path}/config.json cannot be read ({error}): is it still being written?") from None
        # A tied output layer is the embedding under another name: a trainer has both, a folder only one.
        self._tied = bool(config.get("tie_word_embeddings"))
        self.shapes: dict[str, Shape] = {}
        for file in sorted(path.glob("*.safetensors")):
            self.shapes |= tensor_shapes(file)
        if not self.shapes:
            raise ConfigError(f"{path} has no .safetensors: save the model with save_pretrained first")

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise WeightsMismatch unless these are exactly the names and shapes of the model's tensors."""
        got = {name: shape for name, shape in shapes.items() if self._known(name)}
        faults = [
            f"{name} is {got.get(name, 'missing')} and should be {self.shapes.get(name, 'absent')}"
            for name in sorted(self.shapes.keys() | got.keys())
            if got.get(name) != self.shapes.get(name)
        ]
        if faults:
            more = f", and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
            raise WeightsMismatch(
                f"the trainer's weights are not those of {self.path}, and were not sent: "
                f"{'; '.join(faults[:_NAMED])}{more}. Does the server run the model that is trained?"
            )

    def copies(self, tensors: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
        """Return contiguous CPU copies of the model's tensors, with floating-point tensors in torch's `dtype`.

        Raises:
            WeightsMismatch: as `check`.
        """
        import torch

        self.check({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        # Copies, because safetensors refuses tensors that share memory, and the trainer continues to change its own.
        copies = {
            name: tensor.detach().to(
                "cpu", getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype, copy=True
            )
            for name, tensor in tensors.items()
            if self._known(name)
        }
        if unfit := [name for name, copy in copies.items() if not copy.isfinite().all()]:
            raise WeightsMismatch(
                f"the trainer's weights have NaN or infinite values in {', '.join(unfit[:_NAMED])} ({len(unfit)} "
                f"tensors) as {dtype}, and were not sent: either the training has diverged, or serving.dtype is too "
                "narrow"
            )
        return {name: copy.contiguous() for name, copy in copies.items()}

    def write(self, tensors: Mapping[str, torch.Tensor], into: Path, dtype: str) -> None:
        """Write a model folder like this one with other weights, in torch's `dtype`, to the empty folder `into`.

        Raises:
            WeightsMismatch: as `check`; nothing is written.
        """
        from safetensors.torch import save_file

        copies = self.copies(tensors, dtype)
        for file in self.path.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                (into / file.name).symlink_to(file)
        save_file(copies, into / "model.safetensors")

    def _known(self, name: str) -> bool:
        return not (self._tied and name == _OUTPUT and name not in self.shapes)


# --- tensors over a gloo group ----------------------------------------------------------------------------

Post = Callable[[str, Mapping[str, object]], Awaitable[None]]
"""Posts a JSON body to a path of the server. Raises ServingError unless it succeeds."""

_JOIN_S = 60.0


async def send_tensors(
    post: Post,
    url: str,
    version: str,
    tensors: Mapping[str, torch.Tensor],
    ranks: int,
    timeout_s: float,
    bucket_bytes: int,
) -> None:
    """Replace the weights of an SGLang server of `ranks` processes, and flush its cache. Nothing may run on it.

    Raises:
        ServingError: the server did not join the group within 60 s or half of `timeout_s`, or did not load the
            tensors. It may now have some of them.
    """
    join_s = min(_JOIN_S, timeout_s / 2)
    sender = await in_thread(lambda: _Sender(url, tensors, ranks, timeout_s, bucket_bytes), "sender")
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
                f"it did not join a gloo group at {host_port(sender.address, sender.port)} within {join_s:g} s: can "
                "it connect to this machine? GLOO_SOCKET_IFNAME names the network interface"
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

    def __init__(
        self, url: str, tensors: Mapping[str, torch.Tensor], ranks: int, timeout_s: float, bucket_bytes: int
    ) -> None:
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
        self.buckets = list(_buckets(tensors, bucket_bytes))
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
        """End a thread that still waits for the server: such a thread would abort the process when it exits."""
        self._store = None

    def _run(self) -> None:
        try:
            self._send()
        except RuntimeError as error:
            self._failure = str(error)
            # Closing the group makes the server's side fail, too.
            self._group = self._store = None

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


def _buckets(tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> Iterator[Sequence[tuple[str, torch.Tensor]]]:
    """Yield the tensors in buckets of this size, or of one larger tensor.

    The widest elements come first, because the server refuses a tensor that is not aligned to its element size.
    """
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in sorted(tensors.items(), key=lambda named: -named[1].element_size()):
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
