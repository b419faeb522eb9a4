"""Replace two packages that SGLang imports but never calls on the CPU.

SGLang imports `torchvision` and `sgl_kernel` in many modules. Serving a model with torch's attention calls neither:
`torchvision` is for images, which transformers can prepare without it; `sgl_kernel` is built for GPUs (its CPU build
needs a compiler and a container). Models that read images also name, at import, the operations that such a build
registers with torch (`torch.ops.sgl_kernel.*_cpu`). Python imports this file automatically in the engine and its
child processes, because their PYTHONPATH names this folder.

Any attribute of a stub is a class. It can be subclassed, annotated with and inspected, but instantiating or calling
it raises `NotImplementedError`, so no result can come from a stub unnoticed. An installed package takes precedence.

SGLang also pins the memory of recorded routed experts and of LoRA adapters for copies from and to a GPU. Pinning
needs CUDA, so it is left out.

SGLang reads a request's `sampling_seed` only with --enable-deterministic-inference, which it refuses for torch's
attention, because matrix products on the CPU depend on the batch. A server with --max-running-requests 1 has batches
of one request, so the option is allowed, without the kernels for GPUs that replace those products, and with a hash in
torch for the noise of a seed.
"""

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

_32_BITS = 0xFFFFFFFF
NAMES = ("sgl_kernel", "torchvision")
_PINS_EXPERTS = "sglang.srt.mem_cache.pool_host.common"
_BACKENDS, _BATCH_INVARIANT = "sglang.srt.arg_groups.choices", "sglang.srt.batch_invariant_ops"
_HASH = "sglang.kernels.ops.sampling.murmur_hash"
_PINS_ADAPTERS = ("sglang.srt.lora.layers", "sglang.srt.lora.lora", "sglang.srt.lora.backend.torch_backend")


class _Absent(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{cls.__module__}.{cls.__qualname__}.{name}")

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{cls.__module__}.{cls.__qualname__} is not available on the CPU")


def _absent(path: str) -> type:
    module, _, name = path.rpartition(".")
    return _Absent(name, (), {"__module__": module})


class _Stub(types.ModuleType):
    # SGLang requires a minimum version.
    __version__ = "99.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # A path marks this as a package, so that Python looks up its submodules, too.
        self.__path__ = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _absent(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder, so that an installed package takes precedence."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in NAMES:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "sgl_kernel":
            with contextlib.suppress(ImportError):
                import torch

                _stub_operations(torch._ops._OpNamespace)


def _stub_operations(namespace: Any) -> None:
    found = namespace.__getattr__

    def find(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if self.name != "sgl_kernel" or not name.endswith("_cpu"):
                raise
            return _absent(f"torch.ops.sgl_kernel.{name}")

    namespace.__getattr__ = find


class _UnpinnedTorch(types.ModuleType):
    """torch with functions that ignore `pin_memory`."""

    def __init__(self, torch: Any) -> None:
        super().__init__("torch")
        self._torch = torch
        torch.Tensor.pin_memory = lambda tensor, *_: tensor

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._torch, name)
        if name not in ("tensor", "empty", "zeros"):
            return value
        return lambda *args, pin_memory=False, **kwargs: value(*args, **kwargs)


def _murmur_hash32(seed_B: Any, positions_B: Any, columns_V: Any) -> Any:
    """Return [B, V]: MurmurHash3 of a seed of 8 bytes, a position and a column, as SGLang's kernel computes it."""
    # int64 keeps the lower 32 bits of a product.
    seeds = seed_B.to(columns_V.dtype)
    h = 0
    for k in (seeds[:, None], seeds[:, None] >> 32, positions_B[:, None], columns_V[None]):
        k = _rotated((k & _32_BITS) * 0xCC9E2D51 & _32_BITS, 15) * 0x1B873593 & _32_BITS
        h = _rotated(h ^ k, 13) * 5 + 0xE6546B64 & _32_BITS
    # The hash covers 16 bytes.
    h ^= 16
    h = (h ^ h >> 16) * 0x85EBCA6B & _32_BITS
    h = (h ^ h >> 13) * 0xC2B2AE35 & _32_BITS
    return h ^ h >> 16


def _rotated(value: Any, bits: int) -> Any:
    return (value << bits | value >> 32 - bits) & _32_BITS


class _Changed(importlib.machinery.SourceFileLoader):
    """Loads a module, and replaces the parts that need a GPU."""

    def exec_module(self, module: Any) -> None:
        super().exec_module(module)
        if module.__name__ == _PINS_EXPERTS:
            module._cuda_host_register = lambda *_: None
        elif module.__name__ == _BACKENDS:
            module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
        elif module.__name__ == _BATCH_INVARIANT:
            module.enable_batch_invariant_mode = lambda: None
        elif module.__name__ == _HASH:
            module.murmur_hash32 = _murmur_hash32
        else:
            module.torch = _UnpinnedTorch(module.torch)


class _ChangedFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        if name not in (_PINS_EXPERTS, _BACKENDS, _BATCH_INVARIANT, _HASH, *_PINS_ADAPTERS):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _Changed(name, spec.origin)
        return spec


sys.meta_path.append(_Finder())
sys.meta_path.insert(0, _ChangedFinder())
