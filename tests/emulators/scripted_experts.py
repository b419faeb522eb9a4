"""Routed experts for `ScriptedEngine` that follow from a seed, the weights and all tokens before."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollout_backend.config import ExpertShape
from rollout_backend.workbench.local.scripted import Routing


def seeded_routing(shape: ExpertShape, seed: int = 0) -> Routing:
    """Return routing that differs between prefixes, versions and seeds, with distinct experts in each layer."""

    def routing(ids: Sequence[int], version: str) -> NDArray[np.int32]:
        prefix = hashlib.blake2b(f"{seed} {version}".encode(), digest_size=8)
        rows = np.empty((len(ids), shape.layers, shape.topk), dtype=np.int32)
        for row, token in zip(rows, ids, strict=True):
            prefix.update(token.to_bytes(4, "little"))
            random = np.random.default_rng(int.from_bytes(prefix.digest(), "little"))
            row[:] = random.permuted(np.tile(np.arange(shape.experts), (shape.layers, 1)), axis=1)[:, : shape.topk]
        return rows

    return routing
