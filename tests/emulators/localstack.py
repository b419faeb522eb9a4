"""Run the fault tests against LocalStack, a stricter S3 and SQS than moto: `python -m tests.emulators.localstack`.

LocalStack verifies the signatures of presigned URLs, blocks a queue's name for a minute after its deletion, and
refuses a second purge within a minute. It needs Python 3.12 or newer. The first run installs it, which takes a few
minutes, into a separate environment in the cache folder, because its pins conflict with this project's. Further
arguments go to pytest.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import aiohttp
from filelock import FileLock

from rollout_backend.model.serving.install import cache_dir
from rollout_backend.model.serving.server_process import ServerProcess, free_port

ROOT = Path(__file__).parents[2]
NEWER = ("python3.14", "python3.13", "python3.12")
PINS = (
    "localstack-core[runtime]==2026.3.0",
    # LocalStack's own version ranges admit releases that it does not work with.
    *("cbor2<5.8", "cryptography<46", "pyopenssl<25.2", "service_identity<25"),
)
STRICT = {
    "S3_SKIP_SIGNATURE_VALIDATION": "0",
    "SQS_DELAY_PURGE_RETRY": "1",
    "SQS_DELAY_RECENTLY_DELETED": "1",
}


def ensure_installed(python: str | None) -> Path:
    """Return the interpreter of LocalStack's environment. Create the environment if it does not exist."""
    folder = cache_dir() / "localstack-2026.3.0"
    interpreter, ready = folder / "bin" / "python", folder / ".ready"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (ready.is_file() and interpreter.is_file()):  # its base interpreter may have been removed
            base = python or next(filter(None, map(shutil.which, NEWER)), None)
            if base is None:
                sys.exit(
                    f"LocalStack needs Python 3.12 or newer, and none of {', '.join(NEWER)} was found: pass --python "
                    "PATH"
                )
            print(f"installing LocalStack into {folder}", flush=True)
            subprocess.run([base, "-m", "venv", "--clear", folder], check=True)
            subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *PINS], check=True)
            ready.touch()
    return interpreter


async def healthy(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/_localstack/health") as reply:
            return reply.status == 200
    except aiohttp.ClientError:
        return False


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="the Python (3.12 or newer) to install LocalStack with")
    parser.add_argument("--work", type=Path, default=Path("runs/localstack"))
    options, more = parser.parse_known_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    env = {
        **os.environ,
        **STRICT,
        "GATEWAY_LISTEN": f"127.0.0.1:{port}",
        "SERVICES": "s3,sqs",
        "FILESYSTEM_ROOT": str(options.work.absolute() / "localstack"),
        "DISABLE_EVENTS": "1",  # no telemetry
        "SKIP_SSL_CERT_DOWNLOAD": "1",
        "DNS_ADDRESS": "0",
    }
    command = [str(ensure_installed(options.python)), "-m", "localstack.runtime.main"]
    server = ServerProcess("LocalStack", command, options.work / "localstack.log", env)
    await server.start()
    try:
        await server.wait_healthy(lambda: healthy(url), 120.0)
        tests = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pytest", "tests/e2e/test_faults.py", *more),
            cwd=ROOT,
            env={**os.environ, "ROLLOUT_TEST_EMULATOR": url},
        )
        return await tests.wait()
    finally:
        await server.stop()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
