"""Train a LoRA model in training sessions of SageMaker AI, whose model has the operations of Tinker's API.

A call submits an operation, and polls ask for its result.

Invariants:

- A training operation has the next sequence number and a client token. It is sent again with both until the service
  confirms it, so it runs once, and no gap blocks the session.
- An operation that another process sends takes a sequence number. The next operation of this process is then
  refused, and training begins again at the checkpoint.
- A run has one session at a time. A session that has ended is replaced, and training begins again at the checkpoint.
- Each call ends after `training_service.call_s`.
- A sequence ends at the call's own limit or stop token, even if the service sampled more.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from botocore.exceptions import ClientError
from numpy.typing import NDArray
from tenacity import wait_random_exponential

from rollout_backend.base import aws
from rollout_backend.base.names import derived_name
from rollout_backend.base.retry import log_retry, retry_until
from rollout_backend.config import RolloutConfig, StorageConfig
from rollout_backend.errors import ConfigError, TrainingServiceError
from rollout_backend.training.service import BILLED, Checkpoint, Datum, Refusals, Sampler, usage_metrics

log = logging.getLogger(__name__)

SESSION_PREFIX = "rollout-"
LIVE = frozenset({"Created", "Scheduled", "Running", "Blocked"})
"""States of a session that accepts operations, or will."""
MIN_TOKENS = 512
"""The smallest `maxTokens` that the service accepts."""
# AWS's own client sends at most 1,024 sequences and 10 MB in one operation. A trained token takes some 60 bytes.
_OPERATION_DATA, _OPERATION_TOKENS = 1024, 2**15
# AWS creates a session before every reader sees it.
_UNKNOWN = "unknown"
_PENDING = frozenset({"Created", "Scheduled", "Deleting", _UNKNOWN})
_PAUSES = wait_random_exponential(multiplier=0.5, max=10)
_STOP_S = 30.0
_USAGE_S = 30.0
_SAMPLING = {"temperature": "temperature", "top_p": "topP", "top_k": "topK", "seed": "seed"}


class _Unanswered(TrainingServiceError):
    """The service did not answer, or has no result yet: ask again."""


class _SessionEnded(TrainingServiceError):
    """The session accepts no operations."""


class _Refused(ConfigError):
    """The service refuses the call."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def session_name(storage: StorageConfig, run_id: str) -> str:
    """Return what the names of a run's sessions begin with. A hyphen and their number follow."""
    place = f"s3://{storage.bucket}/{storage.prefix}runs/{run_id}"
    return SESSION_PREFIX + derived_name(run_id, "A-Za-z0-9-", 48, of=place)


async def list_sessions(control: Any, name: str) -> list[tuple[str, str]]:
    """Return the name and the status of each session whose name begins with `name`."""
    found: list[tuple[str, str]] = []
    more: dict[str, str] = {}
    while True:
        page = await control.list_training_sessions(NameContains=name, MaxResults=100, **more)
        for each in page.get("TrainingSessionSummaries", ()):
            found.append((each["TrainingSessionArn"].rpartition("/")[2], each["TrainingSessionStatus"]))
        if not (token := page.get("NextToken")):
            return [session for session in found if session[0].startswith(name)]
        more = {"NextToken": token}


class SageMakerService:
    """A model in training. Enter it before use. See `TinkerService`.

    Leaving it without an error stops the session. After an error the session stays, for the process that resumes.
    """

    may_end_samples = False

    def __init__(self, config: RolloutConfig) -> None:
        assert config.training_service is not None
        assert config.training_service.sagemaker is not None
        self._settings = config.training_service
        self._sagemaker = config.training_service.sagemaker
        self._prices = config.prices
        self._region = config.aws.region
        self._name = session_name(config.storage, config.run_id)
        self._stack = contextlib.AsyncExitStack()
        self._control: Any = None
        self._runtime: Any = None
        self._session = ""
        # The sequence number of the next training operation.
        self._next = 1
        # A session with new weights, in which nothing was trained yet.
        self._untrained = ""
        # True if a new session replaced the one with the weights of the last `begin`.
        self._replaced = False
        self._opening = asyncio.Lock()
        self._refusals = Refusals()
        self._billed: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        """Check that SageMaker answers these credentials.

        Raises:
            PreflightError: it refuses them, or does not answer.
        """
        for name, service, retries in (
            ("_control", "sagemaker", 4),
            # Calls of the runtime are repeated until their deadline.
            ("_runtime", "sagemakertrainingsessionruntime", 0),
        ):
            opened = aws.client(
                service,
                region=self._region,
                endpoint_url=self._settings.base_url,
                retries=retries,
                connections=512,
                # A training operation has tens of thousands of numbers, and the service validates them, too.
                parameter_validation=False,
            )
            setattr(self, name, await self._stack.enter_async_context(opened))
        try:
            with aws.explained("SageMaker's training sessions", "training_service"):
                await list_sessions(self._control, self._name)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, kind: object, *exc_info: object) -> None:
        async with self._stack:
            if kind is None and self._session:
                with contextlib.suppress(TrainingServiceError):
                    await self._stop(self._session, asyncio.get_running_loop().time() + _STOP_S)

    async def begin(self, state: str | None) -> None:
        until = self._deadline()
        try:
            async with self._opening:
                await self._open(until, new=state is None)
        except _SessionEnded as error:
            if state is None:
                raise ConfigError(f"{error}. Check the settings of training_service") from error
            raise
        if state is not None:
            self._untrained = ""
            load = {"loadState": {"modelPackageArn": state, "loadOptimizer": True}}
            await self._results([await self._submit(load, until)], until)
        self._replaced = False

    async def train(self, batches: Sequence[Sequence[Datum]]) -> dict[str, float]:
        if self._replaced:
            raise TrainingServiceError("the training session has ended, and its successor has no weights yet")
        until, settings = self._deadline(), self._settings
        self._untrained = ""
        adam = {
            "learningRate": settings.learning_rate,
            "beta1": settings.beta1,
            "beta2": settings.beta2,
            "eps": settings.eps,
            "weightDecay": settings.weight_decay,
            # The service would clip the gradient to 0.
            **({"gradClipNorm": settings.grad_clip_norm} if settings.grad_clip_norm else {}),
        }
        loss: dict[str, Any] = {"lossFnName": settings.loss}
        if settings.loss_options:
            loss["lossFnConfig"] = dict(settings.loss_options)
        metrics: dict[str, float] = {}
        for batch in batches:
            # The service adds the gradients of successive passes.
            parts = [*_parts(batch)]
            sent = []
            for part in parts:
                data = await asyncio.to_thread(lambda: [_datum(datum) for datum in part])  # noqa: B023
                sent.append(await self._submit({"forwardBackward": {**loss, "datumList": data}}, until))
            sent.append(await self._submit({"optimizerStep": {"adamParamsConfig": adam}}, until))
            *passes, step = await self._results(sent, until)
            metrics |= _combined(zip(map(len, parts), passes, strict=True)) | (step.get("metrics") or {})
        return metrics

    async def save(self, name: str, *, keep: bool) -> Checkpoint:
        until = self._deadline()
        sent = [
            await self._submit({"saveState": {"description": name}}, until),
            await self._submit({"saveWeights": {"description": name}}, until),
        ]
        arns = [each.get("modelPackageArn") for each in await self._results(sent, until)]
        if not all(arns):
            raise TrainingServiceError(f"SageMaker saved {name} without the ARN of a model package")
        return Checkpoint(*map(str, arns))

    async def sampler(self, path: str) -> Sampler:
        """Point the session's samples at saved weights, and open a session if the run has none.

        The service samples model packages only, so the base model is saved as one: new weights, not trained.
        """
        if not path:
            await self.begin(None)
            path = (await self.save("base model", keep=True)).sampler
        await self._sample({"loadWeightsForSampling": {"modelPackageArn": path}}, self._deadline())
        return Sampler(path)

    async def sample(
        self, sampler: Sampler, prompt: Sequence[int], params: Mapping[str, Any]
    ) -> tuple[list[int], list[float], str]:
        # The service takes stops as text, which other tokens can spell as well. So it gets none, and the tokens after
        # a stop token are cut off.
        limit, stops = params["max_tokens"], frozenset(params.get("stop") or ())
        found = await self._sample(
            {
                "sample": {
                    "prompt": _model_input(prompt),
                    "numSamples": 1,
                    "samplingParams": {
                        "maxTokens": max(limit, MIN_TOKENS),
                        **{name: params[ours] for ours, name in _SAMPLING.items() if params.get(ours) is not None},
                    },
                    "modelPackageArn": sampler,
                }
            },
            self._deadline(),
        )
        sequence = (found.get("sequences") or [{}])[0]
        tokens, logprobs = list(sequence.get("tokens") or ()), list(sequence.get("logprobs") or ())
        if len(logprobs) != len(tokens) or not logprobs:
            raise TrainingServiceError(f"SageMaker returned {len(tokens)} tokens and {len(logprobs)} logprobs")
        stop = next((count for count, token in enumerate(tokens[:limit], 1) if token in stops), None)
        if stop is not None:
            return tokens[:stop], logprobs[:stop], "stop"
        return tokens[:limit], logprobs[:limit], "length" if len(tokens) > limit else str(sequence["stopReason"])

    # --- sessions -----------------------------------------------------------------------------------------

    async def _open(self, until: float, *, new: bool = False) -> None:
        """Use the run's newest session if it is live, or create another one. `new` is whether it must have new
        weights."""
        listing = functools.partial(list_sessions, self._control, self._name)
        sessions = await self._call("listing training sessions", listing, until)
        numbers = [int(tail) for name, _ in sessions if (tail := name.removeprefix(f"{self._name}-")).isdecimal()]
        number = max(numbers, default=0)
        name, found = f"{self._name}-{number}", dict[str, Any]()
        if number:
            found = await self._describe(name, until)
            if new and found.get("LastReceivedSequenceNumber") and name != self._untrained:
                await self._stop(name, until)
                found = {}
        if found.get("TrainingSessionStatus") not in LIVE:
            name = f"{self._name}-{number + 1}"
            await self._create(name, until)

        async def ready() -> dict[str, Any]:
            found = await self._describe(name, until)
            status, why = found["TrainingSessionStatus"], found.get("ErrorDetails") or "SageMaker does not say why"
            if status in _PENDING:
                raise _Unanswered(f"the training session {name} is {status} and not Running yet")
            if status not in LIVE:
                raise _SessionEnded(f"the training session {name} is {status}: {why}")
            if status == "Blocked":
                log.warning("the training session %s is Blocked: %s", name, why)
            return found

        found = await retry_until(until, ready, _Unanswered, _PAUSES)
        if name != self._session:
            self._billed = _billed(found)
        self._session, self._next = name, int(found.get("LastReceivedSequenceNumber") or 0) + 1
        self._untrained = name if new else self._untrained

    async def _create(self, name: str, until: float) -> None:
        settings, sagemaker = self._settings, self._sagemaker
        log.info("creating the training session %s, which takes minutes", name)
        try:
            await self._call(
                f"creating the training session {name}",
                self._control.create_training_session,
                until,
                TrainingSessionName=name,
                RoleArn=sagemaker.role_arn,
                ModelPackageGroupArn=sagemaker.model_package_group_arn,
                LoraConfig={"Rank": settings.rank, "Alpha": sagemaker.alpha},
                ModelConfig={"BaseModelArn": settings.base_model, "AcceptEula": sagemaker.accept_eula},
                OutputConfig={"S3Location": {"Path": sagemaker.output}},
            )
        except _Refused as error:
            # An earlier call, whose answer was lost, has created it.
            if error.code != "ResourceInUse":
                raise

    async def _stop(self, name: str, until: float) -> None:
        try:
            await self._call(
                f"stopping the training session {name}",
                self._control.stop_training_session,
                until,
                TrainingSessionName=name,
            )
        except _Refused as error:
            # The service refuses to stop a session that is not live.
            if error.code not in ("ValidationException", "ResourceNotFound"):
                log.warning("the training session %s may still run: %s", name, error)

    async def _describe(self, name: str, until: float) -> dict[str, Any]:
        call = self._control.describe_training_session
        try:
            found = await self._call(f"asking for the training session {name}", call, until, TrainingSessionName=name)
        except _Refused as error:
            if error.code != "ResourceNotFound":
                raise
            return {"TrainingSessionStatus": _UNKNOWN}
        return dict(found["TrainingSessionDetail"])

    async def usage(self) -> dict[str, float]:
        if not self._session:
            return {}
        try:
            session = await self._describe(self._session, asyncio.get_running_loop().time() + _USAGE_S)
        except (ConfigError, TrainingServiceError) as error:
            log.warning("the billed tokens are not known: %s", error)
            return {}
        if "BillableTokenUsage" not in session:
            return {}
        before, self._billed = self._billed, _billed(session)
        return usage_metrics({kind: self._billed[kind] - before[kind] for kind in BILLED}, self._prices, "billed_")

    # --- operations ---------------------------------------------------------------------------------------

    async def _submit(self, operation: Mapping[str, Any], until: float) -> tuple[str, str]:
        """Submit a training operation. Return its kind and its id."""
        [kind], number = operation, self._next
        try:
            reply = await self._call(
                kind,
                self._runtime.execute_training_operation,
                until,
                trainingSessionName=self._session,
                sequenceNumber=number,
                clientToken=uuid.uuid4().hex,
                operationConfig=operation,
            )
        except _Refused as error:
            found = await self._describe(self._session, until)
            if int(found.get("LastReceivedSequenceNumber") or 0) < number:
                raise
            raise TrainingServiceError(
                f"{kind}: the training session has an operation {number} of another process: {error}"
            ) from error
        self._next = number + 1
        return kind, reply["operationId"]

    async def _results(self, submitted: Iterable[tuple[str, str]], until: float) -> list[Mapping[str, Any]]:
        ask, session = self._runtime.get_training_operation_result, self._session
        return [await self._result(kind, ask, session, operation, until) for kind, operation in submitted]

    async def _sample(self, operation: Mapping[str, Any], until: float) -> Mapping[str, Any]:
        """Return the result of a sampling operation. If the session has ended, repeat it in another one."""
        async with self._opening:
            if not self._session:
                await self._open(until)
        session = self._session
        try:
            return await self._sampled(session, operation, until)
        except _SessionEnded as error:
            async with self._opening:
                if self._session == session:
                    log.warning("%s; another one is opened", error)
                    self._replaced = True
                    try:
                        await self._open(until)
                    except ConfigError as refusal:
                        # No agent is to blame.
                        raise TrainingServiceError(str(refusal)) from refusal
        return await self._sampled(self._session, operation, until)

    async def _sampled(self, session: str, operation: Mapping[str, Any], until: float) -> Mapping[str, Any]:
        [kind] = operation
        runtime = self._runtime
        reply = await self._call(
            kind, runtime.execute_sampling_operation, until, trainingSessionName=session, operationConfig=operation
        )
        return await self._result(kind, runtime.get_sampling_operation_result, session, reply["operationId"], until)

    async def _result(
        self, kind: str, ask: Callable[..., Awaitable[Any]], session: str, operation: str, until: float
    ) -> Mapping[str, Any]:
        async def poll() -> Mapping[str, Any]:
            reply = await self._call(kind, ask, until, trainingSessionName=session, operationId=operation)
            match status := reply.get("status"):
                case "Completed":
                    found: Mapping[str, Any] = (reply.get("operationResult") or {}).get(kind) or {}
                    return found
                case "Failed":
                    raise TrainingServiceError(f"{kind} failed at SageMaker: {reply.get('errorDetails')}")
                case "Skipped":
                    raise TrainingServiceError(f"SageMaker skipped {kind}, because the session failed before it")
            raise _Unanswered(f"{kind}: no result from SageMaker in time, the operation is {status}")

        return await retry_until(until, poll, _Unanswered, _PAUSES)

    async def _call(self, what: str, method: Callable[..., Awaitable[Any]], until: float, **arguments: Any) -> Any:
        """Call the service until it answers.

        Raises:
            ConfigError: it refuses the call.
            TrainingServiceError: it did not answer in time, or the session has ended.
            CredentialsExpired: these credentials have expired and cannot be renewed.
        """

        async def attempt() -> Any:
            try:
                answer = await method(**arguments)
            except aws.CALL_ERRORS as error:
                aws.raise_if_expired(error, "SageMaker")
                said = f"{what}: {aws.reason(error)}"
                if not isinstance(error, ClientError) or not _is_refusal(error):
                    raise _Unanswered(said) from error
                if aws.is_denied(error) and not self._refusals.refuse():
                    raise _Unanswered(said) from error
                if (code := aws.code_of(error)) in ("ConflictException", "ResourceNotFoundException"):
                    raise _SessionEnded(said) from error
                raise _Refused(str(aws.preflight_error(error, what, "training_service")), code) from error
            self._refusals.accept()
            return answer

        # Thousands of samples are in flight.
        warn = log_retry(log, what, level=logging.DEBUG if what == "sample" else logging.WARNING)
        return await retry_until(until, attempt, _Unanswered, _PAUSES, before_sleep=warn)

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._settings.call_s


def _is_refusal(error: ClientError) -> bool:
    """Return whether a repeated call would be refused as well. A quota of sessions is free again once one ends."""
    if aws.status_of(error) >= 500 or aws.is_throttled(error) or aws.is_renewable(error) or aws.is_of_proxy(error):
        return False
    return aws.code_of(error) != "ResourceLimitExceeded"


def _billed(session: Mapping[str, Any]) -> dict[str, int]:
    usage = session.get("BillableTokenUsage") or {}
    return {kind: int(usage.get(f"{kind.capitalize()}TokenCount") or 0) for kind in BILLED}


def _parts(batch: Sequence[Datum]) -> Iterator[list[Datum]]:
    """Divide a batch into the data of single operations."""
    part, tokens = list[Datum](), 0
    for datum in batch:
        if part and (len(part) == _OPERATION_DATA or tokens + len(datum.tokens) > _OPERATION_TOKENS):
            yield part
            part, tokens = [], 0
        part.append(datum)
        tokens += len(datum.tokens)
    if part:
        yield part


def _datum(datum: Datum) -> dict[str, Any]:
    trained = (datum.advantages != 0).astype("float32")
    return {
        "modelInput": _model_input(datum.tokens.tolist()),
        "lossFnInputs": {
            "target_tokens": _tensor(datum.target_tokens, "int64"),
            "weights": _tensor(trained, "float32"),
            "logprobs": _tensor(datum.logprobs, "float32"),
            "advantages": _tensor(datum.advantages, "float32"),
        },
    }


def _tensor(values: NDArray[Any], dtype: str) -> dict[str, Any]:
    return {"data": values.tolist(), "dtype": dtype, "shape": [len(values)]}


def _model_input(tokens: Sequence[int]) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}


def _combined(passes: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[str, float]:
    """Return the metrics of a batch: means over its data, except the number of tokens and the norm of the sum of its
    gradients."""
    values: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for count, found in passes:
        for name, value in (found.get("metrics") or {}).items():
            values[name].append((count, value))
    return {
        name: each[-1][1]
        if name.endswith("grad_norm")
        else sum(value for _, value in each)
        if name.endswith("token_num")
        else sum(count * value for count, value in each) / sum(count for count, _ in each)
        for name, each in values.items()
    }
