"""Each background task has an owner that sees its failure, and each call of a client ends in time."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# `local` and `testing` run beside a person, not in a run.
MODULES = sorted(
    path
    for package in ("agent_wrapper", "rollout_backend")
    for path in (ROOT / package).rglob("*.py")
    if {"local", "testing"}.isdisjoint(path.relative_to(ROOT).parts[1:3])
)

BACKEND = [path for path in MODULES if path.is_relative_to(ROOT / "rollout_backend")]


class Source:
    """A parsed module, with the parent of each node."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the node's ancestors, from the inside out."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def scope(self, node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> ast.AST:
        return next((each for each in self.above(node) if isinstance(each, kinds)), self.tree)


FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)

# --- tasks ------------------------------------------------------------------------------------------------

# TaskGroups, and the archive, a disk and verl's writer, whose `submit` reports errors.
GROUPS = ("tasks", "group", "searching")
REPORTING = ("self.archive.submit", "self._disk.submit", "self._writer.submit", "self.submit")
CAUGHT = {
    "agent_wrapper/app.py": "self._prepare, self._send_heartbeats and OrphanReaper.run catch every error",
    "rollout_backend/run/services.py": "`failure` reads the errors of `background` for each step",
    "rollout_backend/run/scoring/worker.py": "the worker's loop runs until `serving` ends",
}
"""Modules with tasks whose errors are seen elsewhere."""
STARTS = ("create_task", "ensure_future", "submit", "run_coroutine_threadsafe")


def ownerless(text: str) -> list[int]:
    """Return the lines that start a task or a call in a thread whose error nobody sees.

    It is seen by an `await` of the task, its `result()` or `exception()`, or a done callback that is more than the
    `discard` of a set: in the function that starts it or, for an attribute, in its class. A task that is returned is
    its caller's. A task of a TaskGroup is the group's.
    """
    source, found = Source(text), []
    for node in ast.walk(source.tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STARTS):
            continue
        receiver, work = ast.unparse(node.func.value), ast.unparse(node.args[0]) if node.args else ""
        if receiver in GROUPS or ast.unparse(node.func) in REPORTING or work.startswith("repeat("):
            continue
        parents = list(source.above(node))
        if any(isinstance(each, (ast.Await, ast.Return)) for each in parents[:4]):
            continue
        if isinstance(parents[0], ast.Attribute) and parents[0].attr in ("result", "add_done_callback"):
            continue
        statement = next(each for each in parents if isinstance(each, ast.stmt))
        names = [ast.unparse(each).split("[")[0] for each in getattr(statement, "targets", ())]
        for call in parents:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append":
                names.append(ast.unparse(call.func.value))
        in_class = any(name.startswith("self.") for name in names)
        scope = source.scope(node, (ast.ClassDef,) if in_class else FUNCTION)
        if not any(is_seen(scope, name) for name in names):
            found.append(node.lineno)
    return found


def is_seen(scope: ast.AST, name: str) -> bool:
    word = re.compile(rf"(?<![\w.]){re.escape(name)}(?!\w)")
    for node in ast.walk(scope):
        text = ast.unparse(node) if isinstance(node, (ast.Await, ast.Return, ast.Call)) else ""
        if isinstance(node, (ast.Await, ast.Return)) and word.search(text) and "return_exceptions=True" not in text:
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and word.match(text):
            if node.func.attr in ("result", "exception"):
                return True
            if node.func.attr == "add_done_callback" and not text.endswith("discard)"):
                return True
    return False


@pytest.mark.parametrize(
    "text",
    [
        "async def run():\n    asyncio.create_task(work())",
        "async def run():\n    task = asyncio.create_task(work())\n    task.add_done_callback(tasks.discard)",
        "class A:\n    def run(self):\n        self._task = asyncio.create_task(work())",
        "def run():\n    executor.submit(work)",
    ],
)
def test_a_task_without_an_owner_is_found(text):
    assert ownerless(text)


def test_each_failure_of_a_background_task_is_seen():
    found = {str(path.relative_to(ROOT)): ownerless(path.read_text()) for path in MODULES}
    assert {path: lines for path, lines in found.items() if lines and path not in CAUGHT} == {}


# --- limits -----------------------------------------------------------------------------------------------

CLIENT = re.compile(r"(^|[._])(http|outside|runtime|calls|shard|socket)\.\w+$")
NO_CALL = re.compile(r"\.(admit|close|aclose|closed|watch_sessions|wait|wait_idle)$")
LIMIT = re.compile(r"\btimeout(_at)?\(|\.cut\b|\.limit\(")


def unlimited(text: str) -> set[str]:
    """Return the functions that await a call of a client outside a limit.

    A limit is an `asyncio.timeout` around the call in its function, an argument `timeout` of the call, or a total
    timeout of each HTTP session that the module opens. Clients of AWS limit each call, and `aws` alone makes them.
    """
    source, found = Source(text), set()
    sessions = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and is_session(node)]
    constants = {
        name: ast.unparse(node.value)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assign)
        for name in ast.unparse(node.targets[0]).strip("()").split(", ")
    }
    total = bool(sessions) and all(has_total(each, constants) for each in sessions)
    for node in ast.walk(source.tree):
        awaited: list[ast.expr] = [node.value] if isinstance(node, ast.Await) else []
        if isinstance(node, ast.AsyncWith):
            awaited = [item.context_expr for item in node.items]
        for call in awaited:
            if not isinstance(call, ast.Call) or not CLIENT.search(name := ast.unparse(call.func)):
                continue
            around = [
                ast.unparse(item.context_expr)
                for each in (node, *source.above(node))
                if isinstance(each, ast.AsyncWith)
                for item in each.items
            ]
            is_limited = any(map(LIMIT.search, around)) or "timeout" in {each.arg for each in call.keywords}
            if not is_limited and not NO_CALL.search(name) and not (total and "http" in name):
                found.add(source.scope(node, FUNCTION).name)
    return found


def is_session(call: ast.Call) -> bool:
    return ast.unparse(call.func).endswith("ClientSession")


def has_total(session: ast.Call, constants: dict[str, str]) -> bool:
    given = next((ast.unparse(each.value) for each in session.keywords if each.arg == "timeout"), "")
    return "total=" in (timeout := constants.get(given, given)) and "total=None" not in timeout


LIMITED = {
    "agents/protocols/translator.py": {"invoke", "stop"},  # `TimedCalls` is inside
    "base/aws/repeated_call.py": {"_send"},  # `HTTPSession` limits each request
    "run/checks/preflight.py": {"check"},  # each adapter limits its checks, some of which wait for a deployment
    "workbench/deploy/deployment.py": {"run_smoke_rollout", "_invoke"},  # `AgentCoreRuntime` calls AWS
    "run/dispatch/dispatcher.py": {"submit", "stop_once"},  # `TimedCalls` is inside
    "model/gateway/engine/client.py": {"_post_abort"},  # `_end` limits the aborts that it sends
    "run/janitor/janitor_process.py": {"invoke", "stop"},  # `TimedCalls` is outside
    "model/relay/dialer.py": {"_forward"},  # `_call` limits each call
    "model/relay/exchange.py": {"send_now", "_write"},  # the heartbeat of a WebSocket ends a silent one
    "model/relay/relay_server.py": {"dialer"},  # answers a request, and calls nobody
    "run/lease.py": {"invoke", "stop"},  # `TimedCalls` is inside
    "run/services.py": {"_start"},  # each adapter limits its checks, some of which wait for a deployment
    # `KubernetesApi` limits each call, and `run_verifier` the wait for its container.
    "run/scoring/verifier_jobs.py": {"_run", "stop", "stop_earlier"},
    # Sessions with a total timeout, and `control_client`, which limits its block.
    "model/serving/engine.py": {"_is_ok", "_post", "pause_generation", "reported_version"},
    "model/serving/gateway_fleet.py": {"start_server"},  # each gateway limits its own start
    "model/serving/weights.py": {"load_weights", "post"},  # `control_client` limits its block
}
"""Functions whose calls are limited elsewhere, or wait for no client."""


@pytest.mark.parametrize(
    "text",
    [
        "async def run(self):\n    await self._runtime.invoke(session)",
        "async def run(self):\n    async with self._http.get(url) as reply:\n        pass",
        "async def run():\n    async with ClientSession() as http, http.get(url) as reply:\n        pass",
        "async def run():\n    async with ClientSession(timeout=ClientTimeout(total=None)) as http:\n"
        "        await http.get(url)",
        "async def run(self):\n    async with asyncio.timeout(5):\n        pass\n    await self.shard.revoke(ids)",
    ],
)
def test_a_call_outside_a_limit_is_found(text):
    assert unlimited(text)


def test_each_call_of_a_client_ends_in_time():
    found = {str(path.relative_to(ROOT / "rollout_backend")): unlimited(path.read_text()) for path in BACKEND}
    assert {path: functions for path, functions in found.items() if functions} == LIMITED


POOLED = {
    "model/gateway/server.py",  # `CallTraces.close` ends in time
    "agents/runtimes/kubernetes/api.py",  # reads a kubeconfig, before the run
    "run/checks/examination.py",  # before the run, as are the next
    "run/checks/public_address.py",
    "run/janitor/janitor_process.py",  # `select` and `wait` with a limit
    "run/scoring/rollout_scorer.py",  # packs and unpacks in memory
    "run/scoring/worker.py",  # a process of its own
    "run/scoring/worker_pool.py",  # files of this machine
}
"""Modules of a run whose work in asyncio's own threads ends: these also resolve the names of all hosts."""


def test_work_that_may_hang_has_threads_of_its_own():
    found = {
        str(path.relative_to(ROOT / "rollout_backend"))
        for path in BACKEND
        if path.relative_to(ROOT / "rollout_backend").parts[0] in ("agents", "model", "run")
        and "to_thread(" in path.read_text()
    }
    assert found == POOLED


def test_one_module_makes_the_clients_of_aws():
    """It limits each call. The janitor and the wrapper set their timeouts themselves."""
    made = {
        str(path.relative_to(ROOT))
        for path in MODULES
        if re.search(r"import (aioboto3|aiobotocore|boto3)\b|from aiobotocore\.session", path.read_text())
    }
    assert made == {
        "agent_wrapper/publish.py",
        "rollout_backend/base/aws/clients.py",
        "rollout_backend/run/janitor/__main__.py",
        "rollout_backend/agents/runtimes/agentcore/cleanup.py",
    }
