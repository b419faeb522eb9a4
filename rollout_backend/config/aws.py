"""The `aws` section."""

from __future__ import annotations

from rollout_backend.config.section import Section


class AwsConfig(Section):
    region: str = "us-east-1"
    """Region of bucket and queue. The runtime's region follows from its ARN or its image."""
    endpoint_url: str | None = None
    """Endpoint of S3 and SQS if not AWS, such as a local emulator. Agents get it through their own environment."""
