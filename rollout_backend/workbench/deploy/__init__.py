"""Deploy an agent to AgentCore Runtime and remove it again: `rollout deploy` and `rollout down`."""

from pathlib import Path

INFRA = Path(__file__).with_name("infra")
"""Folder of the templates, manifests and Dockerfiles: a link in a checkout, a copy in a wheel."""
CONSTRAINTS = Path(__file__).with_name("constraints")
"""The versions that were tested."""
