"""Pack the ids of the experts that a mixture-of-experts model chose for each token into a trajectory's arrays. Pure.

A row contains the expert ids of one token: `topk` per layer, of one byte each, or two if a layer has more than 256
experts. An engine has a token's row after it has processed the token, so a sequence of n tokens has n - 1 rows: the
last token was only sampled.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent_wrapper.contract import RoutedExperts
from rollout_backend.config.model import ExpertShape


class ExpertRows(NamedTuple):
    """Rows of consecutive tokens in a sequence; `start` is the position of the first."""

    start: int
    data: bytes


def row_bytes(shape: ExpertShape) -> int:
    return shape.layers * shape.topk * _id_bytes(shape)


def pack(ids: NDArray[np.int32], shape: ExpertShape) -> NDArray[np.uint8]:
    """Return the rows, [tokens, bytes of a row], for the engine's flat array of ids.

    Raises:
        ValueError: the ids do not fit this model's experts. A row of zeros is invalid: an engine that records no
            routing returns such rows.
    """
    per_token = shape.layers * shape.topk
    if ids.size % per_token:
        raise ValueError(f"{ids.size} routed experts are no multiple of {shape.layers} layers x {shape.topk} experts")
    if ids.size and not 0 <= ids.min() <= ids.max() < shape.experts:
        raise ValueError(f"routed experts {ids.min()} to {ids.max()} are not among the model's {shape.experts}")
    rows = ids.reshape(-1, per_token)
    if not rows.any(axis=1).all():
        raise ValueError("the routed experts of a token are all 0, so the engine has not recorded them")
    return rows.astype(_dtype(_id_bytes(shape))).view(np.uint8)


def routed_experts(data: bytes, shape: ExpertShape) -> RoutedExperts:
    """Return the rows of a whole segment as the contract's `RoutedExperts`."""
    return RoutedExperts(layers=shape.layers, topk=shape.topk, id_bytes=_id_bytes(shape), ids=data)


def unpack(experts: RoutedExperts) -> NDArray[np.uint8 | np.uint16]:
    """Return the ids, [tokens, layers, topk], as a view of the memory of `experts`."""
    return np.frombuffer(experts.ids, _dtype(experts.id_bytes)).reshape(-1, experts.layers, experts.topk)


def _id_bytes(shape: ExpertShape) -> int:
    return 1 if shape.experts <= 256 else 2


def _dtype(id_bytes: int) -> str:
    return "u1" if id_bytes == 1 else "<u2"
