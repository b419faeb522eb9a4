"""The requests of the emulated training service that train: passes, optimizer steps, and saved states.

    async with TinkerEmulator(...) as service:
        trainer = EmulatedTrainer(service)

Losses are Tinker's: importance sampling and PPO, added up over the tokens. The optimizer is Adam.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinker.proto import tinker_public_pb2 as pb

from tests.emulators.tinker_emulator import Refusal, TinkerEmulator, TrainedModel

_DTYPES = {pb.DTYPE_INT64: np.int64, pb.DTYPE_FLOAT32: np.float32}
_CLIP = 0.2


@dataclass
class _Learner:
    """The gradient and the optimizer of a model. `history` has a list for each of its optimizer steps, also of those
    before it was loaded: the target tokens of its data."""

    gradient: NDArray[np.float64]
    mean: NDArray[np.float64]
    square: NDArray[np.float64]
    steps: int = 0
    waiting: list[tuple[int, ...]] = field(default_factory=list)
    history: list[list[tuple[int, ...]]] = field(default_factory=list)


@dataclass(frozen=True)
class TrainedDatum:
    """What a client sent to train on."""

    tokens: tuple[int, ...]
    inputs: Mapping[str, NDArray[Any]]


class EmulatedTrainer:
    """Adds the requests to an emulator. `data` holds everything that clients sent, and `states` what they saved."""

    def __init__(self, service: TinkerEmulator) -> None:
        self.data: list[TrainedDatum] = []
        self.states: dict[str, tuple[TrainedModel, _Learner]] = {}
        self._service = service
        self._learners: dict[str, _Learner] = {}
        service.handlers |= {
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "load_weights": self._load_weights,
        }

    def history(self, state: str) -> list[list[tuple[int, ...]]]:
        """Return the target tokens of the data of each optimizer step that a saved state consists of."""
        return self.states[state][1].history

    def _learner(self, model: TrainedModel) -> _Learner:
        zeros = np.zeros_like(model.policy.logits)
        return self._learners.setdefault(model.model_id, _Learner(zeros, zeros, zeros))

    async def _forward_backward(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        request = pb.ForwardBackwardRequest.FromString(body["protobuf"])
        model = self._service.model({"model_id": request.model_id})
        if request.loss_fn not in ("importance_sampling", "ppo"):
            raise Refusal(400, f"Loss {request.loss_fn} is not supported")
        data = [
            TrainedDatum(
                tuple(_tokens(datum)),
                {
                    name: np.frombuffer(tensor.dense, _DTYPES[tensor.dtype])
                    for name, tensor in datum.loss_fn_inputs.items()
                },
            )
            for datum in request.data
        ]
        for datum in data:
            if any(len(values) != len(datum.tokens) for values in datum.inputs.values()):
                raise Refusal(400, "inputs of the loss are not as long as the tokens")

        async def run() -> bytes:
            learner, loss = self._learner(model), 0.0
            for datum in data:
                loss += self._add_gradient(model, learner, datum, request.loss_fn)
                learner.waiting.append(tuple(datum.inputs["target_tokens"].tolist()))
            self.data += data
            reply = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": loss})
            return bytes(reply.SerializeToString())

        request_id = f"{model.model_id}:forward_backward:{request.seq_id}"
        return self._service.enqueue("forward_backward", run, turn=model.turn, request_id=request_id)

    def _add_gradient(self, model: TrainedModel, learner: _Learner, datum: TrainedDatum, loss_fn: str) -> float:
        gradient, loss = learner.gradient.copy(), 0.0
        inputs = (datum.inputs[name].tolist() for name in ("target_tokens", "logprobs", "advantages"))
        for before, target, sampled, advantage in zip(datum.tokens, *inputs, strict=True):
            if advantage == 0:
                continue
            logprobs, column = model.policy.logprobs(before), model.policy.column(target)
            ratio = float(np.exp(logprobs[column] - sampled))
            loss -= ratio * advantage
            clipped = ratio > 1 + _CLIP if advantage > 0 else ratio < 1 - _CLIP
            if loss_fn == "ppo" and clipped:
                continue
            slope = np.exp(logprobs) * ratio * advantage
            slope[column] -= ratio * advantage
            gradient[model.policy.row(before)] += slope
        learner.gradient = gradient
        return loss

    async def _optim_step(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        model, adam = self._service.model(body), body["adam_params"]

        async def run() -> Mapping[str, Any]:
            learner = self._learner(model)
            learner.steps += 1
            learner.mean = adam["beta1"] * learner.mean + (1 - adam["beta1"]) * learner.gradient
            learner.square = adam["beta2"] * learner.square + (1 - adam["beta2"]) * learner.gradient**2
            mean = learner.mean / (1 - adam["beta1"] ** learner.steps)
            square = learner.square / (1 - adam["beta2"] ** learner.steps)
            model.policy.logits = model.policy.logits - adam["learning_rate"] * mean / (np.sqrt(square) + adam["eps"])
            norm = float(np.linalg.norm(learner.gradient))
            learner.gradient = np.zeros_like(learner.gradient)
            learner.history = [*learner.history, learner.waiting]
            learner.waiting = []
            return {"type": "optim_step", "metrics": {"grad_norm": norm}}

        request_id = f"{model.model_id}:optim_step:{body['seq_id']}"
        return self._service.enqueue("optim_step", run, turn=model.turn, request_id=request_id)

    async def _save_weights(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        model = self._service.model(body)

        async def run() -> Mapping[str, Any]:
            path = f"tinker://{model.model_id}/weights/{body['path']}"
            kept = TrainedModel(model.model_id, model.base_model, model.rank, model.policy.copy())
            self.states[path] = kept, copy.deepcopy(self._learner(model))
            return {"path": path, "type": "save_weights"}

        request_id = f"{model.model_id}:save_state:{body['seq_id']}"
        return self._service.enqueue("save_weights", run, turn=model.turn, request_id=request_id)

    async def _load_weights(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if body["path"] not in self.states:
            raise Refusal(404, f"Checkpoint not found: {body['path']}")
        model_id = f"{body['session_id']}:train:{body['model_seq_id']}"

        async def run() -> Mapping[str, Any]:
            saved, learner = self.states[body["path"]]
            self._service.trained[model_id] = TrainedModel(
                model_id, saved.base_model, saved.rank, saved.policy.copy()
            )
            self._learners[model_id] = copy.deepcopy(learner)
            return {"path": body["path"], "model_id": model_id, "type": "load_weights"}

        return self._service.enqueue("load_weights", run, request_id=model_id)


def _tokens(datum: Any) -> Iterator[int]:
    for chunk in datum.model_input:
        yield from np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist()
