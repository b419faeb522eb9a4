"""Cache botocore's service models, because loading those of S3 and SQS takes 0.3 s.

A process that forks one agent per session loads them once: see `rollout_backend.local.prefork`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import boto3
    from botocore.loaders import Loader


def new_session(region: str | None) -> boto3.Session:
    """Return a boto3 session whose clients share this process's models."""
    import boto3  # imported on first use: see shared/trajectory.py
    import botocore.session

    core = botocore.session.get_session()
    core.register_component("data_loader", _loader(core.get_config_variable("data_path")))
    return boto3.Session(botocore_session=core, region_name=region)


def preload_models() -> None:
    """Load the models of S3 and SQS."""
    session = new_session("us-east-1")
    for service in ("s3", "sqs"):  # placeholder credentials, so that botocore does not search for any
        session.client(service, aws_access_key_id="-", aws_secret_access_key="-")  # noqa: S106


@functools.cache
def _loader(data_path: str | None) -> Loader:
    from botocore.loaders import create_loader

    return create_loader(data_path)
