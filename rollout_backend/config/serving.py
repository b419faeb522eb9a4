"""The `serving` section.

To add a kind of engine, write a subclass of `EngineFactory` in a module of `rollout_backend/model/serving/`, and add
its import path to `ENGINE_KINDS`. A kind that is not in `ENGINE_KINDS` is the import path of such a subclass in any
package, such as `my_package.my_engine.MyEngineFactory`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from rollout_backend.base.addresses import ListenAddress
from rollout_backend.config.section import HttpUrl, Seconds, Section, import_kind, kind_choices

if TYPE_CHECKING:
    from rollout_backend.config.rollout import RolloutConfig

EngineName = Literal["sglang", "vllm"]
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ENGINE_KINDS: Mapping[str, str] = {
    "process": "rollout_backend.model.serving.local_engine.LocalEngineFactory",
    "ray": "rollout_backend.model.serving.ray_servers.RayEngineFactory",
    "external": "rollout_backend.model.serving.external_engine.ExternalEngineFactory",
    "tinker": "rollout_backend.training.sampling_server.ServiceEngineFactory",
}
"""Import path of the `EngineFactory` of each kind. It is imported when a run starts, because Ray is slow to
import."""

_HAS_SETTING = {
    "serving.tensor_parallel": ("--tp-size", "--tensor-parallel-size"),
    "serving.pipeline_parallel": ("--pp-size", "--pipeline-parallel-size"),
    "serving.data_parallel": ("--dp-size", "--data-parallel-size"),
    "serving.attention_data_parallel": ("--attn-dp-size", "--attention-data-parallel-size", "--enable-dp-attention"),
    "serving.expert_parallel": ("--ep-size", "--expert-parallel-size"),
    "serving.nodes_per_server": ("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr"),
    "serving.servers": ("--base-gpu-id", "--gpu-id-step"),
    "serving.kind": ("--use-ray",),
    "serving.lora_rank": ("--enable-lora", "--max-lora-rank", "--lora-paths", "--lora-modules"),
    "serving.lora_targets": ("--lora-target-modules",),
    "serving.max_adapters": ("--max-loras", "--max-loras-per-batch"),
}
"""Options of the engines that have a setting: those that decide on which GPUs a server runs, and those for
adapters."""

_STARTUP_S = 300.0
# Bytes of weights that a slow network disk delivers.
_LOADED_PER_S = 0.5e9


class ServingConfig(Section):
    kind: str = Field(
        default="process",
        json_schema_extra={"anyOf": [{"enum": [*ENGINE_KINDS]}, {"type": "string", "format": "import path"}]},
    )
    """`process`: servers on this machine. `ray`: one actor per server, placed on the cluster's GPUs. `external`:
    servers at `urls`, which you run yourself. `tinker`: the service of either kind that `training_service` names,
    without an engine or a GPU of yours; see [training-services.md](training-services.md). Any other value is the
    import path of an `EngineFactory` subclass in your own package."""
    engine: EngineName = "sglang"
    """The inference engine of the servers. `vllm` supports neither `kind=ray` nor images, and uses no router:
    gateways select a server by the session's id."""
    servers: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """Number of servers, for `process` and `ray`. With `ray` on GPUs also `auto`: as many servers as the free GPUs of
    the cluster allow when the run starts."""
    min_servers: int = Field(default=1, ge=1)
    """Servers that must serve before the run begins. The run also waits for all other servers that are starting.
    Servers that wait for machines of the Ray cluster or for a URL to answer, and servers that failed to start, join
    later."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device of the servers."""
    python: Path | None = None
    """Python interpreter of the environment that has the engine. Default: for `cpu` the one that `rollout engine
    install` created, else the interpreter of this process."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of weights and computation."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Tensor parallel size: the GPUs of one pipeline stage. A server uses `tensor_parallel` x `pipeline_parallel` x
    `data_parallel` GPUs."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Pipeline stages per server."""
    data_parallel: int = Field(default=1, ge=1)
    """Copies of the model in one server, each on its own GPUs. Prefer more `servers`: the router keeps a session on
    one server, but a server does not keep it on one copy. Not with `nodes_per_server` above 1."""
    attention_data_parallel: int = Field(default=1, ge=1)
    """Groups of tensor-parallel GPUs that each attend to other requests (data parallel attention). They share the
    GPUs of `tensor_parallel`, which must be a multiple."""
    expert_parallel: int = Field(default=1, ge=1)
    """Expert parallel size of a mixture of experts. Experts share the GPUs of `tensor_parallel`, which must be a
    multiple."""
    nodes_per_server: int = Field(default=1, ge=1)
    """Machines per server, for `ray`: for a model that needs more GPUs than one machine has. Each machine holds an
    equal share of the server's GPUs."""
    threads: int = Field(default=1, ge=1)
    """Threads per server, on the CPU."""
    max_running_requests: int = Field(default=64, ge=1)
    """Concurrent requests per server; further requests wait in the server."""
    max_total_tokens: int | None = Field(default=None, ge=1024)
    """Tokens in a server's cache. Default: 32,768 on the CPU; on a GPU, as many as fit."""
    lora_rank: int | None = Field(default=None, ge=1, le=512)
    """Largest rank of the LoRA adapters that `RolloutManager.load_adapter` loads, for `process` and `ray`. Default:
    engines load no adapters. See [update-weights.md](update-weights.md#lora-adapters)."""
    lora_targets: tuple[LoraTarget, ...] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    """Modules that adapters may change."""
    max_adapters: int = Field(default=4, ge=1)
    """Maximum adapters loaded at the same time. Each reserves memory on the engine for `lora_rank`."""
    extra_args: tuple[str, ...] = ()
    """Arguments appended to the engine's command line. Options that decide on which GPUs a server runs, and those for
    adapters, are refused: each one has a setting here."""
    urls: tuple[HttpUrl, ...] = ()
    """URLs of the servers, for `external`."""
    follow_dns: bool = False
    """Treat each address of the hosts in `urls` as a server, and follow DNS changes: for a headless service of
    Kubernetes."""
    weight_transfer: Literal["disk", "gloo"] = "disk"
    """How tensors given to `update_weights` reach the engines. `disk`: through files in `weights_dir`, which also
    survive a restarted trainer. `gloo`: from the trainer's process over the network; a copy stays in its memory."""
    weights_dir: Path | None = None
    """Folder in which `update_weights` writes tensors, in a folder for each run. Default: `weights` in the run's
    folder. With `ray` on several machines it must be shared by all of them."""
    startup_timeout_s: Seconds | None = None
    """Timeout from a server's start until it answers, and of loading new weights. Default: 300 s, and 2 s for each GB
    of weights in `model.path`, so 580 s for 70 billion parameters in bfloat16."""
    resources_timeout_s: Seconds = 600.0
    """Timeout of a server's wait for machines of the Ray cluster, for `ray`. The wait is reported; a timeout counts
    as a failed start."""
    max_restarts: int = Field(default=3, ge=0)
    """Maximum restarts of one engine, router, gateway or dialer within `restart_window_s`. An engine that exceeds it
    stays down until the window allows another restart, while the other engines serve. The run stops, with the end of
    a log, once no engine is left, or when one of the others exceeds it. For `external`, only servers that do not
    answer again within `startup_timeout_s` count."""
    restart_window_s: Seconds = 3600.0
    """Time for which a restart counts towards `max_restarts`."""

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        if kind not in ENGINE_KINDS:
            import_kind(kind, kind_choices(ENGINE_KINDS, "an EngineFactory subclass"))
        return kind

    @model_validator(mode="after")
    def _kinds(self) -> Self:
        if (self.kind == "external") != bool(self.urls):
            raise ValueError("urls belong to kind=external, and only to it")
        if self.follow_dns and (not self.urls or any(url.startswith("https:") for url in self.urls)):
            raise ValueError("follow_dns needs urls, with http: a certificate is not valid for a single address")
        if self.servers == "auto" and (self.kind != "ray" or self.device == "cpu"):
            raise ValueError(
                "servers=auto counts the GPUs of a Ray cluster: set kind=ray and device=cuda, or a number"
            )
        if self.nodes_per_server > 1 and self.kind != "ray":
            raise ValueError("nodes_per_server above 1 needs kind=ray, which places a server on several machines")
        if self.kind != "external" and self.servers != "auto" and self.min_servers > self.servers:
            raise ValueError(f"min_servers={self.min_servers} is more than servers={self.servers}")
        return self

    @model_validator(mode="after")
    def _vllm_supports_them(self) -> Self:
        if self.engine != "vllm":
            return self
        if self.kind == "ray":
            raise ValueError("engine=vllm runs with kind=process or kind=external: servers on Ray need engine=sglang")
        for name in ("data_parallel", "attention_data_parallel", "expert_parallel"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name}={getattr(self, name)} needs engine=sglang: leave it at 1 with engine=vllm")
        return self

    @model_validator(mode="after")
    def _takes_adapters(self) -> Self:
        if self.lora_rank is None:
            return self
        if self.kind == "external":
            raise ValueError(
                "lora_rank is for servers that this side starts: load adapters into servers of kind=external "
                "yourself, and name them in collect"
            )
        for name in ("data_parallel", "attention_data_parallel"):
            if getattr(self, name) > 1:
                raise ValueError(f"lora_rank needs {name}=1: SGLang loads no adapter into copies of a model")
        return self

    @model_validator(mode="after")
    def _fits_a_service(self) -> Self:
        for name in ("engine", "servers", "lora_rank", "extra_args", "weight_transfer"):
            if self.kind == "tinker" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with kind=tinker, whose service starts no engine: remove it")
        return self

    @model_validator(mode="after")
    def _takes_tensors(self) -> Self:
        if self.weight_transfer == "disk":
            return self
        if self.kind == "external" or self.engine != "sglang":
            raise ValueError(
                f"weight_transfer={self.weight_transfer} needs engine=sglang and servers that the run starts: "
                f"engine={self.engine} with kind={self.kind} takes no weights from update_weights"
            )
        for name in ("pipeline_parallel", "data_parallel", "attention_data_parallel"):
            if getattr(self, name) > 1:
                # SGLang numbers the ranks of a group by tensor parallel rank alone.
                raise ValueError(
                    f"weight_transfer={self.weight_transfer} supports only tensor parallel servers in SGLang: leave "
                    f"{name} at 1, or set weight_transfer=disk"
                )
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        tensor, stages, nodes = self.tensor_parallel, self.pipeline_parallel, self.nodes_per_server
        for name in ("expert_parallel", "attention_data_parallel"):
            if tensor % getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)} must divide tensor_parallel={tensor}, whose GPUs it uses"
                )
        if self.data_parallel > 1 and self.attention_data_parallel > 1:
            raise ValueError(
                "data_parallel and attention_data_parallel exclude each other in SGLang: set one of them"
            )
        if self.data_parallel > 1 and nodes > 1:
            raise ValueError("data_parallel needs nodes_per_server=1: SGLang keeps copies of a model on one machine")
        # A machine holds whole pipeline stages, or a stage spans whole machines.
        if stages % nodes and (nodes % stages or tensor % (nodes // stages)):
            raise ValueError(
                f"nodes_per_server={nodes} does not divide tensor_parallel={tensor} x pipeline_parallel={stages} "
                "GPUs into equal shares of whole pipeline stages, or of a stage"
            )
        if self.device == "cpu" and self.tensor_parallel * self.data_parallel > 1:
            raise ValueError("tensor_parallel and data_parallel need GPUs: leave them at 1 with device=cpu")
        return self

    @field_validator("extra_args")
    @classmethod
    def _refuse_options_with_settings(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        for argument in arguments:
            option = argument.partition("=")[0]
            for setting, names in _HAS_SETTING.items():
                # SGLang accepts unique beginnings of options.
                if len(option) > 3 and any(name.startswith(option) for name in names):
                    raise ValueError(f"{option} is not allowed here: set {setting}")
        return arguments

    def check_run(self, run: RolloutConfig) -> None:
        if self.kind == "tinker":
            _check_service(run)
        for setting, value, default in (
            ("kind", run.router.kind, "sglang-router"),
            ("policy", run.router.policy, "manual"),
        ):
            if self.engine == "vllm" and value != default:
                raise ValueError(
                    f"router.{setting}={value} has no effect with serving.engine=vllm, whose calls pass no router: "
                    "remove it"
                )
        seeds = [
            *(["sampling.seed"] if run.sampling.seed is not None else ()),
            *(["gateway.agent_sampling_overrides=seed"] if "seed" in run.gateway.agent_sampling_overrides else ()),
        ]
        if not seeds or self.engine != "sglang" or self.kind not in ("process", "ray"):
            return
        if "--enable-deterministic-inference" not in self.extra_args:
            raise ValueError(
                f"{' and '.join(seeds)}: SGLang ignores seeds without --enable-deterministic-inference, which costs "
                "throughput: add it to serving.extra_args, or remove the seed"
            )

    @property
    def gpus_per_server(self) -> int:
        """Return how many processes of a server compute, each on one GPU. Experts and attention groups share them."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    def startup_s(self, weight_bytes: int = 0) -> float:
        """Return `startup_timeout_s`, or its default for a model of this size."""
        return self.startup_timeout_s or math.ceil(_STARTUP_S + weight_bytes / _LOADED_PER_S)


def _check_service(run: RolloutConfig) -> None:
    """Raise ValueError if the settings name no training service, or ask for what it cannot do."""
    if run.training_service is None:
        raise ValueError(
            "the section training_service is missing, which names the service that samples: set at least "
            "training_service.base_model"
        )
    if run.model.routed_experts:
        raise ValueError("a training service reports no routed experts: set model.routed_experts=false")
    if run.gateway.constrained_decoding == "allow":
        raise ValueError(
            "a training service forces no format: leave out gateway.constrained_decoding, and set "
            "gateway.forced_tools=as_auto for agents that force tool calls"
        )
    if run.gateway.max_images:
        raise ValueError("a training service is sent no images: leave out gateway.max_images")


RouterKind = Literal["sglang-router", "smg"]


class RouterConfig(Section):
    kind: RouterKind = "sglang-router"
    """The router program. `smg` is the successor of sglang-router and needs the extra `smg`."""
    host: ListenAddress = "127.0.0.1"
    """Address to listen on. With `serving.engine=vllm` no router runs, and the list of servers is served here."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on. 0: any free port."""
    policy: Literal["manual", "cache_aware", "round_robin", "random"] = "manual"
    """Routing policy. `manual` keeps each session, or each group, on one server with its prefix cache."""
    affinity: Literal["session", "group"] = "session"
    """What `manual`, and the gateways with `serving.engine=vllm`, keep on one server: each session, or all sessions
    of a group, which share a prompt."""
    startup_timeout_s: Seconds = 60.0
    """Timeout from its start until it answers."""

    @model_validator(mode="after")
    def _policy_has_affinity(self) -> Self:
        if self.affinity != "session" and self.policy != "manual":
            raise ValueError(
                f"affinity={self.affinity} has no effect with policy={self.policy}, which knows no sessions: use "
                "policy=manual, or remove affinity"
            )
        return self
