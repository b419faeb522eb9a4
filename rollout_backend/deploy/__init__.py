"""Put an agent on AgentCore Runtime and remove it again: `rollout deploy` and `rollout down`."""

from pathlib import Path

INFRA = Path(__file__).with_name("infra")
"""The templates, manifests and Dockerfiles: in a checkout a link to its folder, in a wheel a copy."""
CONSTRAINTS = Path(__file__).with_name("constraints")
"""The versions that were tested."""
