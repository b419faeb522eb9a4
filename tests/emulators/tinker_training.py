"""The requests of the emulated training service that train: passes, optimizer steps, and saved states.

async with TinkerEmulator(...) as service:
    trainer = EmulatedTrainer(service)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from tests.emulators.tinker_emulator import Refusal, TinkerEmulator, TrainedModel
from tests.emulators.tiny_learner import LOSSES, Learner, TrainedDatum

_DTYPES = {pb.DTYPE_INT64: np.int64, pb.DTYPE_FLOAT32: np.float32}


class EmulatedTrainer:
    """Adds the requests to an emulator. `data` holds everything that clients sent, and `states` what they saved."""

    def __init__(self, service: TinkerEmulator) -> None:
        self.data: list[TrainedDatum] = []
        self.states: dict[str, tuple[TrainedModel, Learner]] = {}
        self._service = service
        self._learners: dict[str, Learner] = {}
        service.handlers |= {
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "load_weights": self._load_weights,
        }

    def history(self, state: str) -> list[list[tuple[int, ...]]]:
        """Return the target tokens of the data of each optimizer step that a saved state consists of."""
        return self.states[state][1].history

    def _learner(self, model: TrainedModel) -> Learner:
        return self._learners.setdefault(model.model_id, Learner.of(model.policy))

    async def _forward_backward(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        request = pb.ForwardBackwardRequest.FromString(body["protobuf"])
        model = self._service.model({"model_id": request.model_id})
        if request.loss_fn not in LOSSES:
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
                loss += learner.add_gradient(model.policy, datum, request.loss_fn)
            self.data += data
            reply = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": loss})
            return bytes(reply.SerializeToString())

        request_id = f"{model.model_id}:forward_backward:{request.seq_id}"
        return self._service.enqueue("forward_backward", run, turn=model.turn, request_id=request_id)

    async def _optim_step(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        model, adam = self._service.model(body), body["adam_params"]

        async def run() -> Mapping[str, Any]:
            rates = (adam[name] for name in ("learning_rate", "beta1", "beta2", "eps"))
            norm = self._learner(model).take_step(model.policy, *rates)
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
