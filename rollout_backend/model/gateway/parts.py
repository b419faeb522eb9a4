"""The parts of one gateway process, and how they are wired."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rollout_backend.core.seal import Sealer
from rollout_backend.errors import ConfigError
from rollout_backend.model.dialects.base import Dialect, separators
from rollout_backend.model.dialects.sagemaker_job_runtime import Sample, SampleWithResponseStream
from rollout_backend.model.gateway.access import Authenticator
from rollout_backend.model.gateway.admission import Admission
from rollout_backend.model.gateway.call_handler import CallHandler
from rollout_backend.model.gateway.call_traces import CallTraces
from rollout_backend.model.gateway.engine.client import EngineClient
from rollout_backend.model.gateway.engine.engines import AdapterVersions, Engines
from rollout_backend.model.gateway.engine.protocol import EngineProtocol, SglangProtocol, VllmProtocol
from rollout_backend.model.gateway.gateway_settings import GatewaySettings
from rollout_backend.model.gateway.job_runtime import JobRuntime
from rollout_backend.model.gateway.model_call_executor import ModelCallExecutor
from rollout_backend.model.gateway.sessions.journal import SessionJournal
from rollout_backend.model.gateway.sessions.registry import SessionRegistry
from rollout_backend.model.gateway.stats import GatewayStats
from rollout_backend.model.images import ImageLimits
from rollout_backend.model.rendering.guarded_renderer import RendererBundle


@dataclass(frozen=True)
class GatewayParts:
    """The parts that `Gateway` serves."""

    settings: GatewaySettings
    dialects: Sequence[Dialect]
    stats: GatewayStats
    registry: SessionRegistry
    engines: Engines
    adapters: AdapterVersions
    engine_client: EngineClient
    admission: Admission
    authenticator: Authenticator
    traces: CallTraces | None
    calls: CallHandler
    job_runtime: JobRuntime

    @classmethod
    def build(cls, settings: GatewaySettings, bundle: RendererBundle, dialects: Sequence[type[Dialect]]) -> Self:
        """Raises ConfigError like `server.create_app`."""
        config, model, stats = settings.gateway, settings.model, GatewayStats()
        limits = _image_limits(settings, bundle)
        joined = separators(settings.engine_name, bundle.tokenizer.chat_template)
        journal = SessionJournal(settings.journal) if settings.journal is not None else None
        registry = SessionRegistry(
            bundle,
            model.served_name,
            settings.session_key_s,
            sealer=Sealer(settings.seal_secret) if settings.seal_secret is not None else None,
            journal=journal,
            experts=model.expert_shape,
            max_result_bytes=settings.max_result_bytes,
            stats=stats,
            max_session_calls=config.max_session_calls,
        )
        protocol: EngineProtocol = (
            SglangProtocol(model.expert_shape, settings.router)
            if settings.engine_name == "sglang"
            else VllmProtocol()
        )
        engines = Engines(settings.engine_url, protocol.needs_direct_calls, paused=settings.paused)
        adapters = AdapterVersions(settings.adapters)
        client = EngineClient(
            engines, settings.model_call_s, settings.engine_attempts, protocol, adapters, model.vocabulary_size
        )
        admission = Admission(config.max_concurrent_calls, config.max_queued_per_engine, config.max_session_calls)
        executor = ModelCallExecutor(settings, bundle, stats, client, admission)
        traces = CallTraces(settings.otlp_endpoint) if settings.otlp_endpoint is not None else None
        authenticator = Authenticator(settings, journal.journal_id if journal is not None else "")
        operations = (Sample(limits, joined), SampleWithResponseStream(limits, joined))
        return cls(
            settings=settings,
            dialects=[dialect(limits, joined) for dialect in dialects],
            stats=stats,
            registry=registry,
            engines=engines,
            adapters=adapters,
            engine_client=client,
            admission=admission,
            authenticator=authenticator,
            traces=traces,
            calls=CallHandler(settings, registry, executor, stats, traces, text_only=limits is None),
            job_runtime=JobRuntime(authenticator, registry, settings.body_s, operations),
        )


def _image_limits(settings: GatewaySettings, bundle: RendererBundle) -> ImageLimits | None:
    """Return the limits on images; None if the model or the settings allow none. Raise ConfigError with vLLM."""
    config = settings.gateway
    if bundle.vision is None or not config.max_images:
        return None
    if settings.engine_name == "vllm":
        raise ConfigError("images are not supported with serving.engine=vllm: set gateway.max_images=0")
    return ImageLimits(config.max_images, config.max_image_pixels)
