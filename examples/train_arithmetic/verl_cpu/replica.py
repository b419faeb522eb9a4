"""One server for verl: a `RolloutReplica` that starts a `SGLangServer` and knows its address."""

from __future__ import annotations

import ray
from verl.workers.rollout.replica import RolloutReplica

from rollout_backend.errors import ConfigError
from verl_cpu.replica_server import SGLangServer
from verl_cpu.replica_settings import ServerSettings, model_of, serving_of


def actor_name(replica_rank: int, suffix: str = "") -> str:
    """Return the name of a server's actor, by which the worker with the weights finds it."""
    return f"sglang_cpu_{replica_rank}{suffix}"


class SGLangCpuReplica(RolloutReplica):  # type: ignore[misc]
    """A server on this machine's loopback address. Agents reach it through the gateway."""

    async def launch_servers(self) -> None:
        if self.world_size != 1:
            raise ConfigError(
                f"a replica of {self.world_size} devices is not supported on the CPU: set "
                "actor_rollout_ref.rollout.tensor_model_parallel_size, data_parallel_size and "
                "pipeline_model_parallel_size to 1"
            )
        settings = ServerSettings.of(self.config)
        name = actor_name(self.replica_rank, self.name_suffix)
        actor = ray.remote(SGLangServer).options(
            name=name, num_cpus=0, max_restarts=0, max_concurrency=self.max_concurrency
        )
        server = actor.remote(
            name,
            model_of(self.config, self.model_config),
            serving_of(self.config, self.model_config),
            settings.log_dir.absolute() / f"{name}.log",
            can_sleep=self.config.free_cache_engine,
        )
        self._server_address = await server.launch.remote()
        self._server_handle, self.servers = server, [server]
