"""Agents that are deployed as code: what the emulator refuses, and what an agent sees of this machine."""

import io
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_backend.agents.runtimes.agentcore.provision import CodeArtifact
from rollout_backend.workbench.local.code_artifacts import BuildFailed, CodeStore
from rollout_backend.workbench.local.session_pool import ServiceError

AGENT = "import importlib.util, os, sys\nprint(os.getcwd(), importlib.util.find_spec('boto3'), sys.argv[0])"


@pytest.fixture
def store(tmp_path: Path, local_aws) -> CodeStore:
    return CodeStore(tmp_path, "us-east-1", {**local_aws.environ, "AWS_ENDPOINT_URL": local_aws.endpoint_url})


@pytest.fixture
def upload(local_aws):
    async def upload(name: str, data: bytes) -> dict[str, Any]:
        async with local_aws.s3() as s3:
            await s3.put_object(Bucket=local_aws.bucket, Key=f"code/{name}", Body=data)
        return CodeArtifact(local_aws.bucket, f"code/{name}", "3.12").definition()

    return upload


def zipped(**files: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"{name}.py", text)
    return data.getvalue()


async def test_an_agent_sees_its_zip_and_nothing_of_this_machine(store, upload):
    script = await store.install(await upload("good.zip", zipped(agent=AGENT)))
    env = {"PYTHONDONTWRITEBYTECODE": "1"}
    said = subprocess.run(store.command(script), env=env, capture_output=True, text=True, check=True).stdout.split()
    assert said == [str(script.parent), "None", str(script)]
    assert "PYTHONPATH" not in CodeStore(script.parent, "us-east-1", {"PYTHONPATH": "/here"}).env


async def test_code_that_cannot_run_fails_with_the_reason(store, upload, local_aws, tmp_path):
    with pytest.raises(BuildFailed, match=r"entry point agent\.py is not in s3://"):
        await store.install(await upload("other.zip", zipped(main=AGENT)))
    with pytest.raises(BuildFailed, match="is not a zip file"):
        await store.install(await upload("text.zip", b"text"))
    with pytest.raises(BuildFailed, match=r"cannot be read from s3://.*NoSuchKey"):
        await store.install(CodeArtifact(local_aws.bucket, "code/missing.zip", "3.12").definition())
    small = CodeStore(tmp_path, "us-east-1", store.env, max_unpacked_bytes=10)
    with pytest.raises(BuildFailed, match="exceeds 10 bytes"):
        await small.install(await upload("large.zip", zipped(agent=AGENT + "\n")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given.pop("code"), "needs code.s3, runtime, entryPoint"),
        (lambda given: given.update(runtime="PYTHON_2_7"), "PYTHON_2_7 is not supported"),
        (lambda given: given.update(entryPoint=["python", "-m", "agent"]), "names no Python file"),
    ],
)
def test_code_that_the_service_refuses_at_once(store, change: Callable[[dict[str, Any]], object], message):
    given = CodeArtifact("bucket", "code/1.zip", "3.12").definition()
    store.check(given)
    change(given)
    with pytest.raises(ServiceError, match=message):
        store.check(given)
