"""Train and sample a LoRA model with the SDK `tinker`, on a service that has Tinker's API.

Invariants:

- Each call ends after `training_service.call_s`, however long the SDK retries it.
- If a restarted service has forgotten the session, it is opened again. SkyRL also forgets models, with the weights
  that they saved for samples: a model made from the saved state saves them again.
- A refusal that is not in the API's format comes from a proxy, and counts as no answer. A refusal of the key or of a
  path is an error only if it lasts: see `Refusals`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

from agent_wrapper.shared.threads import in_thread
from rollout_backend.config.results import PriceConfig
from rollout_backend.config.training_service import TrainingServiceConfig
from rollout_backend.errors import ConfigError, TrainingServiceError
from rollout_backend.training.service import Checkpoint, Datum, Forgotten, Refusals, Sampler, usage_metrics

KEY_VARIABLE = "TINKER_API_KEY"
# The SDK refuses a key that begins differently.
_KEY_STARTS = ("tml-", "eyJ")
_EXPIRES_S = 30 * 86_400
_TOKENIZER_S = 60.0
_NO_PRICES = PriceConfig()
# SkyRL's words for a model that it had before a restart, or whose client was away for minutes.
_NOT_LOADED = "not loaded"


class TinkerService:
    """A model in training. Enter it before use.

    async with TinkerService(config.training_service) as service:
        await service.begin(None)
        metrics = await service.train(training_data(result, config, config.training_service).batches(1))
        checkpoint = await service.save("step-1", keep=True)
    """

    # The SDK asks the service to end an abandoned sample, if the service has that enabled.
    may_end_samples = True
    context_tokens: int | None = None
    """Context length of the base model on the service, in tokens; None if the service does not report it."""

    def __init__(
        self, settings: TrainingServiceConfig, *, trains: bool = True, prices: PriceConfig = _NO_PRICES
    ) -> None:
        """Without `trains`, the service need only sample the base model."""
        self._settings = settings
        self._use = "trainable" if trains else "sampleable"
        self._prices = prices
        self._tokens = Counter[str]()
        # Paths of weights whose models the service does not know any more.
        self._lost: set[str] = set()
        self._client: Any = None
        self._model: Any = None
        self._refusals = Refusals()

    async def __aenter__(self) -> Self:
        """Open a session, and check the key and the base model.

        Raises:
            ConfigError: the SDK or the key is missing, or the service refuses the key or does not have the model.
            TrainingServiceError: the service does not answer.
        """
        try:
            # The SDK reads the variable when it is imported.
            os.environ.setdefault("TINKER_TELEMETRY", "0")
            import tinker
        except ModuleNotFoundError:
            raise ConfigError(
                "the SDK tinker is not installed: install this package with its extra `tinker`"
            ) from None
        key = os.environ.get(KEY_VARIABLE, "")
        if not key.startswith(_KEY_STARTS):
            wrong = "does not begin with tml-, as the SDK requires" if key else "is not set"
            raise ConfigError(f"{KEY_VARIABLE} {wrong}: set it to your key of the training service")
        settings, url = self._settings, self._url
        # Version 0.25, which SkyRL 0.4.0 needs, has no client without a session.
        make = getattr(tinker, "RestClient", tinker.ServiceClient)
        async with self._explained("asking for the models"):
            capabilities = await _in_thread(lambda: make(**url).get_server_capabilities())
        models = {
            model.model_name: model
            for model in capabilities.supported_models
            if getattr(model, self._use, True) is not False
        }
        if settings.base_model not in models:
            verb = "train" if self._use == "trainable" else "sample"
            raise ConfigError(
                f"training_service.base_model: the service does not {verb} {settings.base_model!r}. It {verb}s: "
                f"{', '.join(sorted(filter(None, models))) or 'nothing'}"
            )
        self.context_tokens = getattr(models[settings.base_model], "max_context_length", None)
        await self._open()
        return self

    @property
    def _url(self) -> dict[str, str]:
        return {} if self._settings.base_url is None else {"base_url": self._settings.base_url}

    async def _open(self) -> None:
        import tinker

        async with self._explained("opening a session"):
            client = await _in_thread(lambda: tinker.ServiceClient(**self._url))
            await _in_thread(lambda: client.holder)
        self._client = client
        self._refusals.accept()

    async def _in_session(self, what: str, call: Callable[[], Any], *, refuses_late: bool = False) -> Any:
        """Return the result of a call of the SDK. If the service does not know the session, open another one."""
        try:
            async with self._explained(what, refuses_late=refuses_late):
                return await _in_thread(call)
        except Forgotten:
            await self._open()
            async with self._explained(what, forgets=False, refuses_late=refuses_late):
                return await _in_thread(call)

    async def __aexit__(self, *exc_info: object) -> None:
        with contextlib.suppress(TrainingServiceError, ConfigError):
            async with self._explained("closing the session", 30.0):
                if hasattr(self._client, "close"):
                    await self._client.close("success")

    async def begin(self, state: str | None) -> None:
        self._model = None
        settings = self._settings
        self._model = await self._in_session(
            f"creating a model of {settings.base_model!r} with rank {settings.rank}",
            lambda: (
                self._client.create_lora_training_client(settings.base_model, rank=settings.rank)
                if state is None
                else self._client.create_training_client_from_state_with_optimizer(state)
            ),
            # SkyRL reads the rank of a new model when it executes the request.
            refuses_late=state is None,
        )

    async def train(self, batches: Sequence[Sequence[Datum]]) -> dict[str, float]:
        import tinker

        settings, metrics = self._settings, dict[str, float]()
        adam = tinker.AdamParams(
            learning_rate=settings.learning_rate,
            beta1=settings.beta1,
            beta2=settings.beta2,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            grad_clip_norm=settings.grad_clip_norm,
        )
        async with self._explained("training"):
            # The service runs calls in the order in which they were sent, so none waits for the answer to another.
            sent = []
            for batch in batches:
                data = await asyncio.to_thread(lambda: [_tinker_datum(datum) for datum in batch])  # noqa: B023
                sent += [
                    self._model.forward_backward(data, settings.loss, settings.loss_options or None),
                    self._model.optim_step(adam),
                ]
                self._tokens["training"] += sum(len(datum.tokens) for datum in batch)
            for call in sent:
                metrics |= (await call).metrics or {}
        return metrics

    async def usage(self) -> dict[str, float]:
        """Return the tokens of this client's calls since the last call, because the API reports no usage."""
        tokens, self._tokens = self._tokens, Counter()
        return usage_metrics(tokens, self._prices)

    async def save(self, name: str, *, keep: bool) -> Checkpoint:
        expires = None if keep else _EXPIRES_S
        async with self._explained(f"saving {name}"):
            state = self._model.save_state(name, ttl_seconds=expires)
            sampler = self._model.save_weights_for_sampler(name, ttl_seconds=expires)
            return Checkpoint((await state).path, (await sampler).path)

    async def sampler(self, path: str) -> Sampler:
        """Return a client of saved weights, or of the base model if `path` is empty."""
        base = self._settings.base_model
        found_at = await self._saved_again(path) if path in self._lost else path
        source = {"model_path": found_at} if path else {"base_model": base}
        sampler = await self._in_session(
            f"opening the weights {path or base}", lambda: self._client.create_sampling_client(**source)
        )
        async with self._explained("asking for the base model of the weights"):
            found = await _in_thread(sampler.get_base_model)
        if found.partition(":")[0] != base.partition(":")[0]:
            raise ConfigError(f"{path} has weights of {found}, and training_service.base_model is {base}")
        return Sampler((sampler, path))

    async def _saved_again(self, path: str) -> str:
        """Return the path of equal weights. `save` gives both parts of a checkpoint one name."""
        model, _, name = path.rpartition("/")
        # SkyRL's paths have no folder `sampler_weights`.
        state = f"{model.removesuffix('/sampler_weights')}/weights/{name}"
        client = await self._in_session(
            f"creating a model for the samples of {path}",
            lambda: self._client.create_training_client_from_state(state),
        )
        async with self._explained(f"saving {name} again"):
            saved = await client.save_weights_for_sampler(name, ttl_seconds=_EXPIRES_S)
        return str(saved.path)

    async def tokenizer(self, sampler: Any) -> Any:
        """Return the tokenizer that the SDK finds for a sampler's base model, on this machine or on Hugging Face's
        hub.

        Raises:
            TrainingServiceError: it finds none.
        """
        try:
            async with asyncio.timeout(_TOKENIZER_S):
                return await _in_thread(sampler[0].get_tokenizer)
        except Exception as error:
            # Loading a tokenizer may raise anything.
            raise TrainingServiceError(f"the SDK finds no tokenizer of it: {_text(error)}") from error

    async def sample(
        self, sampler: Any, prompt: Sequence[int], params: Mapping[str, Any]
    ) -> tuple[list[int], list[float], str]:
        """Return the tokens of one sequence, their logprobs, and why it ended: `stop` or `length`.

        Raises:
            Forgotten: the service does not know the sampler any more.
            ConfigError: the service refuses the call permanently.
            TrainingServiceError: it fails or does not answer in time.
        """
        from tinker import types

        client, path = sampler
        try:
            async with self._explained("sampling"):
                request = types.ModelInput.from_ints(list(prompt)), 1, types.SamplingParams(**params)
                sent = client.sample(*request)
                # Version 0.25 returns a future of another thread.
                reply = await (sent if isinstance(sent, Awaitable) else asyncio.wrap_future(sent))
                [found] = reply.sequences
        except TrainingServiceError as error:
            if not path or _NOT_LOADED not in str(error):
                raise
            self._lost.add(path)
            raise Forgotten(str(error)) from error
        logprobs = list(found.logprobs or ())
        if len(logprobs) != len(found.tokens) or not logprobs:
            raise TrainingServiceError(
                f"the service returned {len(found.tokens)} tokens and {len(logprobs)} logprobs"
            )
        self._tokens.update(prefill=len(prompt), sample=len(found.tokens))
        return list(found.tokens), logprobs, str(getattr(found.stop_reason, "value", found.stop_reason))

    @contextlib.asynccontextmanager
    async def _explained(
        self, what: str, timeout_s: float | None = None, *, forgets: bool = True, refuses_late: bool = False
    ) -> AsyncIterator[None]:
        """Convert the SDK's errors to this package's. An unknown path is `Forgotten`; without `forgets`, it is a
        wrong setting. With `refuses_late`, a request that was accepted and then refused is one, too."""
        import tinker

        where = self._settings.base_url or "the training service"
        try:
            async with asyncio.timeout(timeout_s or self._settings.call_s):
                yield
        except tinker.APIStatusError as error:
            if error.status_code < 500 and not isinstance(error.body, Mapping):
                raise TrainingServiceError(f"{what}: a proxy answers for {where}: {_text(error)}") from error
            if isinstance(error, (tinker.AuthenticationError, tinker.PermissionDeniedError)):
                kind: type[Exception] = ConfigError if self._refusals.refuse() else TrainingServiceError
                raise kind(f"{what}: {where} refuses the key in {KEY_VARIABLE}: {_text(error)}") from error
            if isinstance(error, tinker.NotFoundError):
                kind = Forgotten if forgets else ConfigError if self._refusals.refuse() else TrainingServiceError
                raise kind(f"{what}: {where} refuses it: {_text(error)}") from error
            if isinstance(error, (tinker.BadRequestError, tinker.UnprocessableEntityError)):
                raise ConfigError(f"{what}: {where} refuses it: {_text(error)}") from error
            raise TrainingServiceError(f"{what} failed at {where}: {_text(error)}") from error
        except tinker.RequestFailedError as error:
            if str(getattr(error.category, "value", error.category)) == "user":
                raise ConfigError(f"{what}: {where} refuses it: {_text(error)}") from error
            raise TrainingServiceError(f"{what} failed at {where}: {_text(error)}") from error
        except TimeoutError as error:
            raise TrainingServiceError(f"{what}: no answer from {where} in time") from error
        # The SDK reports the loss of a request with a ValueError, and asserts what an older service's answer lacks.
        except (tinker.TinkerError, ValueError, AssertionError) as error:
            refusal = error.__cause__
            if refuses_late and isinstance(refusal, tinker.BadRequestError) and isinstance(refusal.body, Mapping):
                raise ConfigError(f"{what}: {where} refuses it: {_text(refusal)}") from error
            raise TrainingServiceError(f"{what} failed at {where}: {_text(error)}") from error
        else:
            # The first calls may need no key.
            if self._client is not None:
                self._refusals.accept()


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Return the result of a call of the SDK, or of the future that newer versions return.

    The call may block for as long as the service is silent. Then nothing waits for its thread, not even the end of
    the process.
    """

    def run() -> Any:
        found = call()
        return found.result() if hasattr(found, "result") else found

    return await in_thread(run, "training-service")


def _text(error: Exception) -> str:
    """Return an error in one line: a service may answer with a page."""
    return " ".join(str(error).split())[:500] or type(error).__name__


def _tinker_datum(datum: Datum) -> Any:
    from tinker import types

    return types.Datum(
        model_input=types.ModelInput.from_ints(datum.tokens.tolist()),
        loss_fn_inputs={
            "target_tokens": datum.target_tokens,
            "logprobs": datum.logprobs,
            "advantages": datum.advantages,
        },
    )
