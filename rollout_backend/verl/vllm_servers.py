"""List verl's vLLM servers, each with its middleware attached to the actor that knows its weight version."""

from __future__ import annotations

from typing import Any

import ray

from rollout_backend.verl.verl_api import server_actors, server_addresses
from rollout_backend.verl.vllm_middleware import attach


class VllmServers:
    """`load_balancer` is verl's actor, which has the servers' actors by HOST:PORT."""

    def __init__(self, load_balancer: Any) -> None:
        self._load_balancer = load_balancer
        self._attached: set[str] = set()

    def addresses(self) -> list[str]:
        """Return the servers as HOST:PORT. Those that joined since the last call report versions from now on. Blocks.

        Raises:
            RayError: the load balancer or a server does not answer.
        """
        listed = server_addresses(self._load_balancer)
        self._attached &= set(listed)
        if joined := set(listed) - self._attached:
            actors = server_actors(self._load_balancer)
            ray.get([actors[address].__ray_call__.remote(attach) for address in joined])
            self._attached |= joined
        return listed
