"""Check a training service before anything is spent: its key, URL, base model, context and tokenizer.

A service has no vocabulary in its API. The SDK finds the tokenizer by the base model's name, on this machine or on
Hugging Face's hub. If it finds none, the tokenizers are not compared, and a warning says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from rollout_backend.base.check_result import CheckResult
from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ConfigError, PreflightError, TrainingServiceError
from rollout_backend.training.sagemaker import SageMakerService
from rollout_backend.training.tinker import TinkerService

_NAME = "training_service"
# The service's own limit is for samples and for training.
_ANSWER_S = 60.0
_TOKENIZER = f"{_NAME}-tokenizer"


async def check_service(config: RolloutConfig, *, trains: bool) -> list[CheckResult]:
    """Return what was found, for a training on the service or for a run that samples from it."""
    settings = config.training_service
    assert settings is not None, "the settings require it"
    if settings.kind == "sagemaker":
        return [await _check_sessions(config), *(_check_sampling(config) if not trains else ())]
    where = settings.base_url or "Thinking Machines' service"
    service = TinkerService(settings, trains=trains)
    try:
        async with asyncio.timeout(_ANSWER_S):
            await service.__aenter__()
    except ConfigError as error:
        return [CheckResult.of_error(_NAME, error)]
    except (TrainingServiceError, TimeoutError) as error:
        why = str(error) or f"no answer within {_ANSWER_S:g} s"
        return [
            CheckResult("warning", _NAME, f"{where} cannot be used yet: {why}. A run waits for it when it starts")
        ]
    try:
        found = [CheckResult("ok", _NAME, f"{where} has {settings.base_model}"), _check_context(config, service)]
        found += [*_check_sampling(config)] if not trains else []
        found.append(await _check_tokenizer(config, service, "" if trains else settings.sampler))
    finally:
        await service.__aexit__(None, None, None)
    text = "the service's API has no prices: what it bills for tokens is in no estimate of a run"
    return [*found, CheckResult("unchecked", "prices", text, f"{_NAME}-prices")]


async def _check_sessions(config: RolloutConfig) -> CheckResult:
    try:
        async with SageMakerService(config):
            return CheckResult("ok", _NAME, f"SageMaker lists its training sessions in {config.aws.region}")
    except PreflightError as error:
        return CheckResult.of_error(_NAME, error)


def _check_context(config: RolloutConfig, service: TinkerService) -> CheckResult:
    name, setting = f"{_NAME}-context", "model.context_length"
    try:
        wanted = config.model.context_tokens
    except ConfigError as error:
        return CheckResult("problem", setting, str(error), name)
    if service.context_tokens is None or wanted <= service.context_tokens:
        return CheckResult("ok", setting, f"the service's context has room for {wanted:,} tokens", name)
    text = f"{wanted:,} is above the service's {service.context_tokens:,}, which refuses longer calls: lower it"
    return CheckResult("problem", setting, text, name)


def _check_sampling(config: RolloutConfig) -> Iterator[CheckResult]:
    changed = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    if names := [name for name, neutral in changed.items() if getattr(config.sampling, name) != neutral]:
        text = (
            f"{', '.join(names)}: a service's logprobs are those before them, so the rollouts can be evaluated and "
            "not trained"
        )
        yield CheckResult("warning", "sampling", text, f"{_NAME}-logprobs")


async def _check_tokenizer(config: RolloutConfig, service: TinkerService, path: str) -> CheckResult:
    # The renderer imports transformers, which is slow to import.
    from rollout_backend.model.rendering.renderer import load_renderer

    assert config.training_service is not None
    model, base = config.model.path, config.training_service.base_model
    try:
        ours = (await asyncio.to_thread(load_renderer, config.model)).tokenizer
        async with asyncio.timeout(_ANSWER_S):
            sampler = await service.sampler(path)
        theirs = await service.tokenizer(sampler)
    except ConfigError as error:
        return CheckResult("problem", "model.path" if path == "" else _NAME, str(error), _TOKENIZER)
    except (TrainingServiceError, TimeoutError) as error:
        why = str(error) or f"no answer within {_ANSWER_S:g} s"
        text = f"its tokenizer must be that of {base}, and was not compared with it: {why}"
        return CheckResult("warning", "model.path", text, _TOKENIZER)
    if difference := describe_difference(ours.get_vocab(), theirs.get_vocab()):
        text = (
            f"{model} has another tokenizer than {base}: {difference}. Set it to a folder with that model's tokenizer"
        )
        return CheckResult("problem", "model.path", text, _TOKENIZER)
    return CheckResult("ok", "model.path", f"{model} has the tokenizer of {base}", _TOKENIZER)


def describe_difference(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    """Describe how two vocabularies differ; empty if they do not."""
    here, there = ({number: token for token, number in each.items()} for each in (ours, theirs))
    differ = sorted(number for number in here.keys() | there.keys() if here.get(number) != there.get(number))
    if not differ:
        return ""
    first = differ[0]
    shown = " and ".join(
        f"{each[first]!r} {place}" if first in each else f"unknown {place}"
        for each, place in ((here, "here"), (there, "there"))
    )
    return f"{len(differ):,} of {len(here.keys() | there.keys()):,} ids differ; id {first} is {shown}"
