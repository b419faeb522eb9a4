"""The container of a task that has its own image, in the payload of its rollouts."""

from __future__ import annotations

from pydantic import Field

from agent_wrapper.contract import ContractObject

CONTAINER_FIELD = "_container"
"""The field of a payload that holds the container, for a runtime that starts it."""


class TaskContainer(ContractObject):
    """What a task's container is started with."""

    image: str
    workdir: str | None = None  # None: the image's
    env: dict[str, str] = Field(default={})
    resources: dict[str, str] = Field(default={})
    """Quantities of Kubernetes, reserved and enforced."""
