"""botocore's descriptions of the services that a result goes to: megabytes of JSON, read once in a process.

A process that forks one agent per session reads them ahead, for all of them: see `rollout_backend.local.prefork`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import boto3
    from botocore.loaders import Loader


def new_session(region: str | None) -> boto3.Session:
    """A session of boto3 whose clients share what this process has read."""
    import boto3  # late: see trajectory.py
    import botocore.session

    core = botocore.session.get_session()
    core.register_component("data_loader", _descriptions(core.get_config_variable("data_path")))
    return boto3.Session(botocore_session=core, region_name=region)


def read_ahead() -> None:
    """Reads what a client of S3 and one of SQS need. A quarter of a second."""
    session = new_session("us-east-1")
    for service in ("s3", "sqs"):  # credentials of no one, so that none are looked for
        session.client(service, aws_access_key_id="-", aws_secret_access_key="-")  # noqa: S106


@functools.cache
def _descriptions(data_path: str | None) -> Loader:
    from botocore.loaders import create_loader

    return create_loader(data_path)
