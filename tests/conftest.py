"""Fixtures for all tests: S3 and SQS as local servers, and rollouts to store in them."""

import atexit
import functools
import gc
import importlib
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

import rollouts
from agent_servers import serve_agent
from agent_wrapper.contract import Rollout
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.testing.fault_proxy import FaultProxy
from rollout_backend.workbench.local.cloud import LocalStorage

pytest_plugins = ["gateway_fixtures"]  # in tests/support

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a mistyped folder must not be looked up on the model hub

# Property tests play the same examples each time, so that `make test` says the same of the same code. With
# --hypothesis-profile=explore (`make test-all`) they draw new ones; commit what they find as an `@example`.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None, max_examples=40)
settings.register_profile("explore", deadline=None, max_examples=400, print_blob=True)
settings.load_profile("fixed")


# httpx reads the certificates of public authorities for each client, 25 ms of CPU, and no server of a test has one.
_create_context = ssl.create_default_context
_context_of = functools.cache(lambda cafile: _create_context(cafile=cafile))


def _shared_context(*purpose: ssl.Purpose, **of: Any) -> ssl.SSLContext:
    return _context_of(of["cafile"]) if of.keys() == {"cafile"} and not purpose else _create_context(*purpose, **of)


ssl.create_default_context = _shared_context


RUNS = Path(__file__).parents[1] / "runs"
_quick = False


def pytest_runtest_setup(item: pytest.Item) -> None:
    global _quick
    _quick = not {"slow", "engine"} & {marker.name for marker in item.iter_markers()}


def _keep_runs_out(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse to write runs of tests into the clone, where `rollout ls` would list them as the user's."""
    if event == "os.mkdir" and _quick and RUNS in Path(os.fsdecode(arguments[0])).absolute().parents:
        raise AssertionError(f"{arguments[0]} is among the user's runs: set output_dir to a folder in tmp_path")


sys.addaudithook(_keep_runs_out)

LONGEST = ("e2e", "infra", "serving", "simulation")  # folders of tests/ with the longest files

# Tests that share what takes long to start, or take gigabytes, by the beginnings of their paths. They run in one
# process, so not at the same time.
GROUPS = {
    "real engine": (
        "tests/model/gateway/test_real_engine.py",
        "tests/model/gateway/test_token_identity.py",
    ),
    "tokenizers": ("tests/model/rendering/families/",),
    "several engines": (
        "tests/e2e/test_killed_machine.py",
        "tests/e2e/test_new_weights.py",
    ),
}


def group_of(nodeid: str) -> str:
    """Return the group of a test; without one, its file."""
    file = nodeid.partition("::")[0]
    return next((group for group, paths in GROUPS.items() if file.startswith(paths)), file)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect tests without garbage collections: they visit what imports have made, which stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # or the interpreter's end warns of sockets that modules hold
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the groups, then with the folders that take longest."""
    items.sort(key=lambda item: (group_of(item.nodeid) not in GROUPS, item.path.parent.name not in LONGEST))


class ByFile(LoadScopeScheduling):
    """Run the tests of a group in one process, and those of each other file."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStorage]:
    """moto's server with one bucket, for the whole session: tests keep apart by their run ids."""
    local = LocalStorage(run_dir=tmp_path_factory.mktemp("moto"), any_key=True)  # tests tell callers apart by keys
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(local):
        yield local


@pytest.fixture
def local_aws(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> LocalStorage:
    """Let this process's AWS clients reach only the local storage."""
    for name, value in storage.environ.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return storage


@pytest.fixture
async def proxy(local_aws: LocalStorage) -> AsyncIterator[FaultProxy]:
    """Open a proxy for faults in front of S3 and SQS."""
    async with FaultProxy(local_aws.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def local_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set credentials for local services."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "local")


class CredentialProvider:
    """A `credential_process`, the only source of credentials. Its key ids count its runs; at first, it fails."""

    def __init__(self, folder: Path) -> None:
        self.answer, self.runs, self.program = folder / "answer", folder / "runs", folder / "program"
        self.runs.touch()
        count = f"echo >> {self.runs}\nsed s/RUN/RUN$(wc -l < {self.runs} | tr -d ' ')/ {self.answer}"
        self.program.write_text(f"#!/bin/sh\n{count}\n")
        self.program.chmod(0o755)

    def returns(self, *, lasting_s: float) -> None:
        end = datetime.now(UTC) + timedelta(seconds=lasting_s)
        keys = {"Version": 1, "AccessKeyId": "RUN", "SecretAccessKey": "s", "SessionToken": "t"}
        self.answer.write_text(json.dumps({**keys, "Expiration": end.isoformat()}))


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CredentialProvider:
    made, config = CredentialProvider(tmp_path), tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {made.program}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return made


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> str:
    return f"test-{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**10}"


@pytest.fixture
def make_rollout(run_id: str) -> Callable[..., Rollout]:
    """Return results of the test's own run."""
    return functools.partial(rollouts.make_rollout, run_id=run_id)


@pytest.fixture
def claims() -> Callable[..., SessionClaims]:
    return rollouts.make_claims


@pytest.fixture(scope="session")
def agentcore_python(repository: Path) -> Path:
    """The interpreter of an environment with AWS's SDK, which is made once: its boto3 is not that of this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(repository / "benchmarks")
        environments = importlib.import_module("rivals.environments")
    python: Path = environments.python_of("agentcore", repository / "constraints" / "agentcore.txt")
    return python


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parent.parent


@pytest.fixture(scope="session")
def agent_server(storage: LocalStorage, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start the arithmetic example as a server and return its URL."""
    script = repository / "examples" / "arithmetic" / "agent.py"
    with serve_agent(script, storage, tmp_path_factory.mktemp("agent")) as url:
        yield url
