"""MiniStack's S3 and SQS on this machine, beside moto's."""

import os
from pathlib import Path

from harnesses import installed
from rollout_backend.model.serving.server_process import ServerProcess
from rollout_backend.workbench.local.cloud import LocalStorage


class MiniStack(LocalStorage):
    """S3 and SQS of another project, with one bucket."""

    _health = "_ministack/health"

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir=run_dir, any_key=True)
        address = self.endpoint_url.removeprefix("http://")
        argv = [
            str(installed("ministack.txt") / "bin/python"),
            "-m",
            "hypercorn",
            "ministack.app:app",
            "--bind",
            address,
        ]
        env = {**os.environ, **self.environ, "GATEWAY_PORT": address.partition(":")[2]}
        self.process = ServerProcess("MiniStack", argv, run_dir / "ministack.log", env)
