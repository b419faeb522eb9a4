"""Stands in for two packages that SGLang imports and, on the CPU, never calls.

`torchvision` and `sgl_kernel` are named in import statements all over SGLang, yet on the path that serves a model
with torch's own attention nothing of them runs: the one is for images, which transformers can prepare without it, the
other is built for GPUs (its CPU build comes with a compiler and a container of its own). The operations that such a
build would register with torch (`torch.ops.sgl_kernel.*_cpu`) are named at import too, by the models that read
images. Python imports this file by itself, in the engine and in
the processes that the engine starts, because only their PYTHONPATH names this folder.

Any attribute of a stand-in is a class: it can be subclassed, annotated with and looked into, but making one or
calling it raises `NotImplementedError`, so nothing can be computed with it unnoticed. An installed package of the
name is left alone.
"""

import contextlib
import importlib.abc
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

NAMES = ("sgl_kernel", "torchvision")


class _Absent(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{cls.__module__}.{cls.__qualname__}.{name}")

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{cls.__module__}.{cls.__qualname__} is not there on the CPU")


def _absent(path: str) -> type:
    module, _, name = path.rpartition(".")
    return _Absent(name, (), {"__module__": module})


class _StandIn(types.ModuleType):
    __version__ = "99.0"  # SGLang compares it with the least that it accepts

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package, so that its submodules are asked for too

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _absent(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last, so a real package comes first."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in NAMES:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "sgl_kernel":
            with contextlib.suppress(ImportError):
                import torch

                _stand_in_for_operations(torch._ops._OpNamespace)


def _stand_in_for_operations(namespace: Any) -> None:
    found = namespace.__getattr__

    def find(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if self.name != "sgl_kernel" or not name.endswith("_cpu"):
                raise
            return _absent(f"torch.ops.sgl_kernel.{name}")

    namespace.__getattr__ = find


sys.meta_path.append(_Finder())
