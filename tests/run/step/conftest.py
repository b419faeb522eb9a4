"""Steps over real S3 and SQS, with agents that run in this process.

The limits of time are long. A test in which one is reached advances the loop's clock (`skip`).
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rollout_backend.config import load_config
from rollout_backend.workbench.local.cloud import LocalStorage
from step_bench import Bench


@pytest.fixture
async def open_bench(
    local_aws: LocalStorage, run_id: str, tmp_path: Path
) -> AsyncIterator[Callable[..., Awaitable[Bench]]]:
    """Open a run. Arguments override its settings."""
    base = {
        "run_id": run_id,
        "output_dir": str(tmp_path / "runs"),
        "model": {"path": str(tmp_path)},
        "storage": {"bucket": local_aws.bucket},
        "aws": {"region": local_aws.region, "endpoint_url": local_aws.endpoint_url},
        "runtime": {"kind": "http", "url": "http://127.0.0.1:9", "invoke_per_s": 1000, "stop_per_s": 1000},
        "queue": {"wait_s": 1},
        "group": {"size": 2},
        "collect": {"list_after_idle_s": 60},
        "timeouts": {
            "model_call_s": 5,
            "agent_s": 60,
            "publish_grace_s": 20,
            "collection_s": 600,
            "session_key_s": 900,
        },
    }
    async with AsyncExitStack() as stack:

        async def open_(*overrides: str) -> Bench:
            return await Bench.open(load_config(base=base, overrides=overrides, env={}), stack)

        yield open_
