"""An emulator of SageMaker's training sessions, to which botocore's clients connect unchanged.

    async with SageMakerEmulator({MODEL: TabularPolicy(ids)}) as service:
        control = boto3.client("sagemaker", endpoint_url=service.url)
        runtime = boto3.client("sagemakertrainingsessionruntime", endpoint_url=service.url)

It follows botocore's model of both services, and where that is silent the client of the package `sagemaker-train`
1.27.0: an operation waits for all lower sequence numbers while its session is Blocked, a repeated client token gets
the first operation, another operation with a used number is refused, and operations after a failure of the session
are Skipped. Nobody has compared it with the service. Signatures are not checked.

Invariants:

- `samples` holds every sequence that was sampled, in order.
- Operations run in the order of their sequence numbers, each once.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from aiohttp import web

from tests.emulators.tinker_emulator import Sample
from tests.emulators.tiny_learner import LOSSES, Learner, TabularPolicy, TrainedDatum

ACCOUNT, REGION = "123456789012", "us-east-1"
MODEL = f"arn:aws:sagemaker:{REGION}:aws:hub-content/SageMakerPublicHub/Model/tiny/1.0.0"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/TrainingSessions"
GROUP = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:model-package-group/checkpoints"
_ACCEPTING = ("Running", "Blocked")
_MAX_BYTES = 12_000_000
_DTYPES = {"int64": np.int64, "float32": np.float32}
_RL_INPUTS = {"target_tokens", "weights", "advantages", "logprobs"}
_ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


@dataclass
class SageMakerFaults:
    """What goes wrong. Names are those of operations, such as `ExecuteTrainingOperation`."""

    errors: dict[str, list[str]] = field(default_factory=dict)
    """Codes with which the next calls of a name are refused, such as `ThrottlingException`, in order."""
    pages: dict[str, list[int]] = field(default_factory=dict)
    """Statuses with which a proxy answers the next calls of a name, with a page of its own."""
    silent: set[str] = field(default_factory=set)
    """Calls of these names are not answered, and do nothing."""
    lost: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Number of next calls of a name that are executed, but whose connection closes without an answer."""
    failing: dict[str, list[str]] = field(default_factory=dict)
    """Details with which the next operations of a kind, such as `forwardBackward`, fail."""
    session_fails: bool = False
    """Whether the session fails with the next failing operation."""
    held: bool = False
    """While set, training operations stay Pending. See `SageMakerEmulator.release`."""
    polls: int = 0
    """Number of polls in which each operation is still InProgress."""
    provision_polls: int = 1
    """Number of descriptions in which a new session is still Created."""
    provision_failure: str = ""
    """Details with which new sessions fail."""


@dataclass
class Session:
    name: str
    request: Mapping[str, Any]
    policy: TabularPolicy
    learner: Learner
    status: str = "Created"
    details: str = ""
    described: int = 0
    received: int = 0
    executed: int = 0
    waiting: dict[int, str] = field(default_factory=dict)
    """Ids of operations that wait for a lower sequence number."""
    tokens: dict[str, tuple[Mapping[str, Any], str]] = field(default_factory=dict)
    """Parameters and id of the operation of each client token."""
    operations: dict[str, Operation] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("Prefill", "Sample", "Training"), 0))


@dataclass
class Operation:
    kind: str
    config: Mapping[str, Any]
    status: str = "Pending"
    result: Mapping[str, Any] | None = None
    error: str = ""
    polls: int = 0


class Refusal(Exception):
    """An error of the service, by its code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


_STATUSES = {
    "ConflictException": 409,
    "ResourceNotFoundException": 404,
    "ThrottlingException": 429,
    "InternalServerException": 500,
}


class SageMakerEmulator:
    """An async context manager. `policies` are the base models by ARN, and `sessions` the sessions by name.

    A policy learns `rate_scale` times as fast as the service allows, so that tests see it learn.
    """

    def __init__(
        self,
        policies: Mapping[str, TabularPolicy],
        *,
        max_rank: int = 64,
        max_sessions: int = 2,
        rate_scale: float = 30,
    ) -> None:
        self.url = ""
        self.policies = dict(policies)
        self.faults = SageMakerFaults()
        self.sessions: dict[str, Session] = {}
        self.saved: dict[str, tuple[str, TabularPolicy]] = {}
        """Weights of each model package, with the ARN of their base model."""
        self.states: dict[str, tuple[TabularPolicy, Learner]] = {}
        self.samples: list[Sample] = []
        self.data: list[TrainedDatum] = []
        """Everything that clients sent to train on."""
        self.counts: defaultdict[str, int] = defaultdict(int)
        """Calls by name."""
        self._arrivals = asyncio.Condition()
        self._max_rank = max_rank
        self._max_sessions = max_sessions
        self._rate_scale = rate_scale
        self._ids = itertools.count(1)
        self._runner: web.AppRunner | None = None
        self._control: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
            "CreateTrainingSession": self._create,
            "DescribeTrainingSession": self._describe,
            "ListTrainingSessions": self._list,
            "StopTrainingSession": self._stop,
            "DeleteTrainingSession": self._delete,
        }

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=_MAX_BYTES)
        app.router.add_post("/", self._serve_control)
        path = "/v1/training-sessions/{session}/"
        app.router.add_post(path + "operations", self._answering("ExecuteTrainingOperation", self._train))
        app.router.add_post(path + "sampling-operations", self._answering("ExecuteSamplingOperation", self._sample))
        for results, name in (("operations", "Training"), ("sampling-operations", "Sampling")):
            app.router.add_get(path + results + "/{id}", self._answering(f"Get{name}OperationResult", self._result))
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def history(self, state: str) -> list[list[tuple[int, ...]]]:
        """Return the target tokens of the data of each optimizer step that a saved state consists of."""
        return self.states[state][1].history

    def end_sessions(self, status: str) -> None:
        """End all live sessions, such as with `Expired`."""
        for session in self.sessions.values():
            if session.status in ("Created", *_ACCEPTING):
                session.status = status

    async def arrived(self, name: str, count: int) -> None:
        """Wait until this number of calls of a name has arrived."""
        async with self._arrivals:
            await self._arrivals.wait_for(lambda: self.counts[name] >= count)

    def release(self) -> None:
        """Run the training operations that were held."""
        self.faults.held = False
        for session in self.sessions.values():
            self._advance(session)

    # --- HTTP ---------------------------------------------------------------------------------------------

    async def _serve_control(self, request: web.Request) -> web.StreamResponse:
        name = request.headers["X-Amz-Target"].removeprefix("SageMaker.")
        body = await request.json()
        return await self._answer(request, name, lambda: self._control[name](body))

    def _answering(self, name: str, handler: Callable[[Session, Mapping[str, Any]], Mapping[str, Any]]) -> Any:
        async def serve(request: web.Request) -> web.StreamResponse:
            body = await request.json() if request.can_read_body else dict(request.match_info)
            return await self._answer(request, name, lambda: handler(self._session(request), body))

        return serve

    async def _answer(
        self, request: web.Request, name: str, handler: Callable[[], Mapping[str, Any]]
    ) -> web.StreamResponse:
        async with self._arrivals:
            self.counts[name] += 1
            self._arrivals.notify_all()
        assert "/sagemaker/aws4_request" in request.headers["Authorization"]
        if name in self.faults.silent:
            await asyncio.Event().wait()
        if pages := self.faults.pages.get(name):
            return web.Response(status=pages.pop(0), text="<html>the service cannot be reached</html>")
        try:
            if errors := self.faults.errors.get(name):
                raise Refusal(errors.pop(0), "the emulator was told to refuse this")
            reply = handler()
        except Refusal as refusal:
            body = {"__type": refusal.code, "message": str(refusal)}
            return web.json_response(body, status=_STATUSES.get(refusal.code, 400))
        if self.faults.lost[name]:
            self.faults.lost[name] -= 1
            assert request.transport is not None
            request.transport.close()
        return web.json_response(reply)

    def _session(self, request: web.Request) -> Session:
        name = request.match_info["session"]
        if name not in self.sessions:
            raise Refusal("ResourceNotFoundException", f"Training session {name} does not exist")
        return self.sessions[name]

    # --- control plane ------------------------------------------------------------------------------------

    def _create(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        name, model = body["TrainingSessionName"], body["ModelConfig"]["BaseModelArn"]
        assert re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name)
        assert body["OutputConfig"]["S3Location"]["Path"].startswith("s3://")
        if name in self.sessions:
            raise Refusal("ResourceInUse", f"Training session {name} already exists")
        if body["RoleArn"] != ROLE:
            raise Refusal("ValidationException", f"Could not assume role {body['RoleArn']}")
        if model not in self.policies:
            raise Refusal("ResourceNotFound", f"Hub content {model} does not exist")
        if body["ModelPackageGroupArn"] != GROUP:
            raise Refusal("ResourceNotFound", "Model package group does not exist")
        if not 0 < body["LoraConfig"]["Rank"] <= self._max_rank or body["LoraConfig"]["Alpha"] < 1:
            raise Refusal("ValidationException", f"LoRA rank must be at most {self._max_rank}")
        if sum(each.status in ("Created", *_ACCEPTING) for each in self.sessions.values()) >= self._max_sessions:
            raise Refusal("ResourceLimitExceeded", "The account has too many training sessions")
        policy = self.policies[model].copy()
        self.sessions[name] = Session(name, body, policy, Learner.of(policy))
        return {"TrainingSessionArn": _arn(name)}

    def _named(self, body: Mapping[str, Any]) -> Session:
        if (name := body["TrainingSessionName"]) not in self.sessions:
            raise Refusal("ResourceNotFound", f"Training session {name} does not exist")
        return self.sessions[name]

    def _describe(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        session = self._named(body)
        session.described += 1
        if session.status == "Created" and session.described > self.faults.provision_polls:
            session.status, session.details = "Running", self.faults.provision_failure
            if session.details:
                session.status = "Failed"
        elif session.status == "Stopping":
            session.status = "Stopped"
        detail = {
            "TrainingSessionArn": _arn(session.name),
            "TrainingSessionName": session.name,
            "TrainingSessionStatus": session.status,
            "CreationTime": 1_790_000_000,
            "BillableTokenUsage": {f"{name}TokenCount": count for name, count in session.usage.items()},
            **({"LastReceivedSequenceNumber": session.received} if session.received else {}),
            **({"ErrorDetails": session.details} if session.details else {}),
        }
        return {"TrainingSessionDetail": detail}

    def _list(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        # One session a page.
        names = [name for name in self.sessions if body.get("NameContains", "") in name]
        index = int(body.get("NextToken", 0))
        page = [
            {
                "TrainingSessionArn": _arn(name),
                "TrainingSessionStatus": self.sessions[name].status,
                "CreationTime": 1_790_000_000,
            }
            for name in names[index : index + 1]
        ]
        more = {"NextToken": str(index + 1)} if index + 1 < len(names) else {}
        return {"TrainingSessionSummaries": page, **more}

    def _stop(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        session = self._named(body)
        if session.status not in ("Created", *_ACCEPTING):
            raise Refusal(
                "ValidationException", f"invalid session state transition from {session.status} to Stopping"
            )
        session.status = "Stopping"
        return {}

    def _delete(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        session = self._named(body)
        if session.status not in ("Stopped", "Failed", "Expired"):
            raise Refusal(
                "ValidationException", f"invalid session state transition from {session.status} to Deleting"
            )
        del self.sessions[session.name]
        return {}

    # --- operations ---------------------------------------------------------------------------------------

    def _train(self, session: Session, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if session.status not in _ACCEPTING:
            raise Refusal("ConflictException", f"Training session is {session.status}")
        token, number = body["clientToken"], body["sequenceNumber"]
        if token in session.tokens:
            given, operation_id = session.tokens[token]
            if given != body:
                raise Refusal("ValidationException", "the client token was used with other parameters")
            return {"operationId": operation_id}
        if number <= session.executed or number in session.waiting:
            raise Refusal("ValidationException", f"invalid sequence number {number}")
        [(kind, config)] = body["operationConfig"].items()
        self._check(kind, config)
        operation_id = f"operation-{next(self._ids)}"
        session.tokens[token] = body, operation_id
        session.operations[operation_id] = Operation(kind, config)
        session.waiting[number] = operation_id
        session.received = max(session.received, number)
        if not self.faults.held:
            self._advance(session)
        return {"operationId": operation_id}

    def _advance(self, session: Session) -> None:
        while (waiting := session.waiting.pop(session.executed + 1, None)) is not None:
            session.executed += 1
            self._execute(session, session.operations[waiting])
        if session.status in _ACCEPTING:
            session.status = "Blocked" if session.waiting else "Running"

    def _check(self, kind: str, config: Mapping[str, Any]) -> None:
        if kind == "loadState" and config["modelPackageArn"] not in self.states:
            raise Refusal("ValidationException", f"{config['modelPackageArn']} holds no training state")
        if kind == "optimizerStep" and not 0 < config["adamParamsConfig"]["learningRate"] <= 0.01:
            raise Refusal("ValidationException", "learningRate must be at most 0.01")
        if kind != "forwardBackward":
            return
        if config["lossFnName"] not in LOSSES:
            raise Refusal("ValidationException", f"Loss {config['lossFnName']} is not supported")
        for datum in config["datumList"]:
            length = len(_tokens(datum["modelInput"]))
            if datum["lossFnInputs"].keys() != _RL_INPUTS:
                raise Refusal("ValidationException", f"the loss needs {', '.join(sorted(_RL_INPUTS))}")
            if any(len(each["data"]) != length for each in datum["lossFnInputs"].values()):
                raise Refusal("ValidationException", "inputs of the loss are not as long as the tokens")

    def _execute(self, session: Session, operation: Operation) -> None:
        if session.status not in _ACCEPTING:
            operation.status = "Skipped"
            return
        if failures := self.faults.failing.get(operation.kind):
            operation.status, operation.error = "Failed", failures.pop(0)
            if self.faults.session_fails:
                session.status, session.details = "Failed", operation.error
            return
        work = {
            "forwardBackward": self._forward_backward,
            "optimizerStep": self._optimizer_step,
            "saveState": self._save_state,
            "saveWeights": self._save_weights,
            "loadState": self._load_state,
        }[operation.kind]
        operation.status, operation.result = "Completed", work(session, operation.config)

    def _forward_backward(self, session: Session, config: Mapping[str, Any]) -> Mapping[str, Any]:
        loss = 0.0
        for sent in config["datumList"]:
            inputs = {
                name: np.array(tensor["data"], _DTYPES[tensor["dtype"]])
                for name, tensor in sent["lossFnInputs"].items()
            }
            datum = TrainedDatum(tuple(_tokens(sent["modelInput"])), inputs)
            loss += session.learner.add_gradient(session.policy, datum, config["lossFnName"])
            session.usage["Training"] += len(datum.tokens)
            self.data.append(datum)
        return {"metrics": {"loss": loss / len(config["datumList"])}}

    def _optimizer_step(self, session: Session, config: Mapping[str, Any]) -> Mapping[str, Any]:
        adam = {**_ADAM, **config["adamParamsConfig"]}
        rate = adam["learningRate"] * self._rate_scale
        norm = session.learner.take_step(session.policy, rate, adam["beta1"], adam["beta2"], adam["eps"])
        return {"metrics": {"grad_norm": norm}}

    def _package(self) -> str:
        return f"{GROUP.replace('-group/', '/')}/{next(self._ids)}"

    def _save_state(self, session: Session, config: Mapping[str, Any]) -> Mapping[str, Any]:
        arn = self._package()
        self.states[arn] = session.policy.copy(), copy.deepcopy(session.learner)
        return {"modelPackageArn": arn}

    def _save_weights(self, session: Session, config: Mapping[str, Any]) -> Mapping[str, Any]:
        arn = self._package()
        self.saved[arn] = session.request["ModelConfig"]["BaseModelArn"], session.policy.copy()
        return {"modelPackageArn": arn}

    def _load_state(self, session: Session, config: Mapping[str, Any]) -> Mapping[str, Any]:
        assert config["loadOptimizer"] is True
        policy, learner = self.states[config["modelPackageArn"]]
        session.policy, session.learner = policy.copy(), copy.deepcopy(learner)
        return {}

    def _sample(self, session: Session, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if session.status not in _ACCEPTING:
            raise Refusal("ConflictException", f"Training session is {session.status}")
        [(kind, config)] = body["operationConfig"].items()
        arn = config["modelPackageArn"]
        if arn not in self.saved:
            raise Refusal("ValidationException", f"{arn} holds no weights")
        operation = Operation(kind, config, "Completed", {})
        if failures := self.faults.failing.get(kind):
            operation.status, operation.error = "Failed", failures.pop(0)
        elif kind == "sample":
            operation.result = self._sequence(session, config)
        operation_id = f"operation-{next(self._ids)}"
        session.operations[operation_id] = operation
        return {"operationId": operation_id}

    def _sequence(self, session: Session, config: Mapping[str, Any]) -> Mapping[str, Any]:
        params, prompt = config["samplingParams"], _tokens(config["prompt"])
        if not 512 <= params["maxTokens"] <= 131_072 or not 0 <= params.get("temperature", 1) <= 2:
            raise Refusal("ValidationException", "maxTokens must be from 512 to 131072, and temperature from 0 to 2")
        assert config["numSamples"] == 1
        rng = np.random.default_rng(params.get("seed", next(self._ids)))
        names = {"temperature": "temperature", "topP": "top_p", "topK": "top_k"}
        wanted = {ours: params[name] for name, ours in names.items() if name in params}
        policy = self.saved[config["modelPackageArn"]][1]
        tokens, logprobs, reason = policy.sample(prompt, {"max_tokens": params["maxTokens"], **wanted}, rng)
        arn = config["modelPackageArn"]
        self.samples.append(Sample(tuple(prompt), tuple(tokens), tuple(logprobs), params, arn))
        session.usage["Prefill"] += len(prompt)
        session.usage["Sample"] += len(tokens)
        return {"sequences": [{"tokens": tokens, "logprobs": logprobs, "stopReason": reason}]}

    def _result(self, session: Session, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if (operation := session.operations.get(body["id"])) is None:
            raise Refusal("ResourceNotFoundException", "Operation does not exist")
        operation.polls += 1
        if operation.status == "Completed" and operation.polls <= self.faults.polls:
            return {"status": "InProgress"}
        if operation.status == "Failed":
            return {"status": "Failed", "errorDetails": operation.error}
        if operation.status == "Completed":
            return {"status": "Completed", "operationResult": {operation.kind: operation.result}}
        return {"status": operation.status}


def _tokens(model_input: Mapping[str, Any]) -> list[int]:
    assert all(chunk["type"] == "encoded_text" for chunk in model_input["chunks"])
    return [token for chunk in model_input["chunks"] for token in chunk["tokens"]]


def _arn(name: str) -> str:
    return f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-session/{name}"
