"""The folder that the model was loaded from, as the template of the folders with its new weights.

Invariants:

- Only weights with exactly the names and shapes of the model reach a server. SGLang dies of a wrong shape, and
  silently keeps the old value of a missing tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from safetensors import SafetensorError, safe_open

from rollout_backend.errors import ConfigError, WeightsMismatch

if TYPE_CHECKING:  # a manager whose trainer is another process needs no torch
    import torch

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf", ".pt", ".pth")
_OUTPUT = "lm_head.weight"
_NAMED = 5

Shape = tuple[int, ...]


def tensor_shapes(file: Path) -> dict[str, Shape]:
    """Return the shape of each tensor in a safetensors file. Raise ConfigError if it cannot be read."""
    try:
        with safe_open(file, framework="np") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): is it still being written?") from None


class ModelFolder:
    """The names and shapes of the tensors in `path`; the tensors themselves are not read.

    Raises:
        ConfigError: `path` is not a model folder, or has no complete safetensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            config = json.loads((path / "config.json").read_text())
        except OSError as error:
            raise ConfigError(f"{path} is not a model folder: {error.strerror} for config.json") from None
        # A tied output layer is the embedding under another name: a trainer has both, a folder only one.
        self._tied = bool(config.get("tie_word_embeddings"))
        self.shapes: dict[str, Shape] = {}
        for file in sorted(path.glob("*.safetensors")):
            self.shapes |= tensor_shapes(file)
        if not self.shapes:
            raise ConfigError(f"{path} has no .safetensors: save the model with save_pretrained first")

    @classmethod
    def at(cls, path: str | Path) -> Self:
        return cls(Path(path).absolute())

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise WeightsMismatch unless `tensors` have exactly the names and shapes of the model."""
        self._check({name: tuple(tensor.shape) for name, tensor in tensors.items()})

    def check_folder(self, other: ModelFolder) -> None:
        """Raise WeightsMismatch unless another folder has exactly the names and shapes of the model."""
        self._check(other.shapes)

    def _check(self, shapes: Mapping[str, Shape]) -> None:
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
        """Return contiguous copies of the model's tensors on the CPU, in torch's `dtype` where they are of floats.

        Raises:
            WeightsMismatch: as `check`.
        """
        import torch

        self.check(tensors)
        # Copies: safetensors refuses tensors that share memory, and the trainer keeps changing its tensors.
        copies = {
            name: tensor.detach().to(
                "cpu", getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype, copy=True
            )
            for name, tensor in tensors.items()
            if self._known(name)
        }
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
