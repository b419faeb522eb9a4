"""mini-swe-agent on generated Harbor tasks: at the AgentCore emulator, as processes, and on Kubernetes."""

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from agent_wrapper.contract import Rollout
from rollout_backend.agents.runtimes.agentcore.control import control_client, list_runtimes
from rollout_backend.core.tasks import read_tasks
from rollout_backend.model.serving.server_process import free_port
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.workbench.local.cloud import LocalRuntime, LocalStorage
from rollout_backend.workbench.local.control_plane import ControlLimits
from rollout_backend.workbench.local.scripted import BYTE_MODEL, ScriptedEngine, ToolCall
from tests.emulators.kubernetes_emulator import KubernetesEmulator
from tests.emulators.kubernetes_images import FolderImage, can_make_containers
from token_exact import is_token_exact, recorded_calls

MODEL = f"model={{path: {BYTE_MODEL}, renderer: chatml, context_length: 32768}}"
GIVEN_UP = "clamp"  # the second task


@pytest.fixture(scope="module")
def made(load):
    return load("swe_agent/make_tasks.py")


def passes(code: str, name: str, cases) -> bool:
    space: dict = {}
    exec(dedent(code), space)
    return all(space[name](*arguments) == expected for arguments, expected in cases)


def test_each_of_the_ten_tasks_has_one_bug_that_its_hidden_tests_find(made, tmp_path):
    made.make_tasks(tmp_path)
    assert [task.task_id for task in read_tasks(f"harbor:{tmp_path}")] == sorted(bug.name for bug in made.BUGS)
    assert len(made.BUGS) == 10
    for bug in made.BUGS:
        assert bug.code.count(bug.wrong) == 1, bug.name
        assert passes(bug.code.replace(bug.wrong, bug.right), bug.name, bug.cases), bug.name
        if bug.name != "gcd":  # does not end
            assert not passes(bug.code, bug.name, bug.cases), bug.name


def script(bugs):
    """Return a model that reads a file, fixes one task's bug, and submits; it gives the other up at once."""
    done = ToolCall("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})

    def reply(prompt: str) -> str | ToolCall:
        bug = next((each for each in bugs if f"`{each.name}` in" in prompt), None)
        if bug is None:
            return "ok"  # to the probe of the endpoint
        if bug.name == GIVEN_UP:
            return done
        file = f"{bug.name}.py"
        edit = f"from pathlib import Path; f = Path({file!r}); "
        edit += f"f.write_text(f.read_text().replace({bug.wrong!r}, {bug.right!r}))"
        look = ToolCall("bash", {"command": f"cat {file}"})
        fix = ToolCall("bash", {"command": f"python -c {shlex.quote(edit)}"})
        return (look, fix, done)[prompt.count("<|im_start|>assistant\n") - 1]

    return reply


def as_processes(example: Path, engine: ScriptedEngine) -> list[str]:
    serving = f"serving={{kind: external, urls: ['{engine.url}']}}"
    return ["run", str(example / "config.yaml"), "--local", "-o", MODEL, "-o", serving]


def in_cloud(
    example: Path, settings: str, engine: ScriptedEngine, storage: LocalStorage, **runtime: object
) -> list[str]:
    """Return the command of a run with this engine, and these S3 and SQS."""
    port = free_port()
    overrides = [
        MODEL,
        f"gateway={{host: 127.0.0.1, port: {port}, public_url: 'http://127.0.0.1:{port}'}}",
        f"serving={{kind: external, urls: ['{engine.url}']}}",
        f"aws={{region: {storage.region}, endpoint_url: '{storage.endpoint_url}'}}",
        f"storage.bucket={storage.bucket}",
        *(f"runtime.{name}={value}" for name, value in runtime.items()),
    ]
    return ["run", str(example / settings), *(part for each in overrides for part in ("-o", each))]


def images(tasks: Path, folder: Path, root: Path) -> dict[str, FolderImage]:
    """Return the agent's image and that of each task, as kubernetes.yaml names them."""
    python = folder / "agent" / "agent" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # The option -I is left out: this checkout is found by PYTHONPATH.
    python.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={root} exec {sys.executable} -P "$@"\n')
    python.chmod(0o755)
    env = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "HOME": "/logs"}
    found = {"registry.example.com/swe-agent:1": FolderImage(folder / "agent", env)}
    for task in tasks.iterdir():
        shutil.copytree(task / "environment", folder / task.name / "task-files")
        image = f"registry.example.com/tasks/{task.name}:1"
        found[image] = FolderImage(folder / task.name, env, "/task-files")
    return found


async def run(argv: list[str], folder: Path, root: Path, tasks: int, **env: str) -> dict[str, dict]:
    """Run `rollout` with the first tasks. Return the records of their rollouts by task."""
    common = ["--tasks", "harbor:tasks", "--limit", str(tasks), "-o", "group.size=1", "-o", "run_id=r"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rollout_backend",
        *argv,
        *common,
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(root), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    async with asyncio.timeout(300):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    lines = (folder / "runs" / "r" / "steps" / "00000000.rollouts.jsonl").read_text().splitlines()
    return {record["task_id"]: record for record in map(json.loads, lines)}


def tokens(folder: Path) -> dict[str, list[tuple[int, ...]]]:
    """Return the tokens of each task's rollout."""
    archive = RunArchive(folder / "runs" / "r")
    found = [archive.read_result(record) for record in archive.read_records(0)]
    return {each.task_id: [tuple(segment.token_ids) for segment in each.segments] for each in found}


def check_run(records: dict[str, dict], folder: Path, engine: ScriptedEngine, bugs: list) -> None:
    """Check the rollouts of the first tasks: what their hidden tests find, and their tokens."""
    names = [bug.name for bug in sorted(bugs, key=lambda bug: bug.name)][: len(records)]
    assert sorted(records) == names
    assert {record["outcome"] for record in records.values()} == {"completed"}
    rewards = {name: float(name != GIVEN_UP) for name in names}
    assert {name: record["result"]["reward"] for name, record in records.items()} == rewards
    turns = {name: 1 if name == GIVEN_UP else 3 for name in names}
    assert {name: record["result"]["turns"] for name, record in records.items()} == turns
    assert all(record["trainable"] and record["result"]["segments"] == 1 for record in records.values())
    stored = (folder / "runs" / "r" / "rollouts" / "00000000").glob("[!.]*")
    rollouts = [Rollout.decode(file.read_bytes()) for file in stored]
    assert len(recorded_calls(rollouts)) == sum(turns.values())
    is_token_exact(rollouts, engine, script(bugs))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.release
async def test_the_ten_tasks_as_processes_and_on_kubernetes_sample_the_same_tokens(examples, made, tmp_path, storage):
    places = tmp_path / "processes", tmp_path / "kubernetes"
    for place in places:
        made.make_tasks(place / "tasks")
    with ScriptedEngine(script(made.BUGS)) as engine:
        records = await run(as_processes(examples / "swe_agent", engine), places[0], examples.parent, 10)
    check_run(records, places[0], engine, made.BUGS)
    if not can_make_containers():
        pytest.skip("the kernel lets this user make no mount namespace")
    spawners = images(places[1] / "tasks", tmp_path / "images", examples.parent)
    with ScriptedEngine(script(made.BUGS)) as engine:
        async with KubernetesEmulator(spawners, tmp_path / "cluster") as cluster:
            place = {"kubeconfig": cluster.kubeconfig, "start_timeout_s": 300}
            argv = in_cloud(examples / "swe_agent", "kubernetes.yaml", engine, storage, **place)
            records = await run(argv, places[1], examples.parent, 10, **storage.environ)
            assert cluster.running_pods() == []
            jobs = [each for each in cluster.created if each["kind"] == "Job"]
            secrets = [each for each in cluster.created if each["kind"] == "Secret"]
    check_run(records, places[1], engine, made.BUGS)
    assert tokens(places[1]) == tokens(places[0])
    verifiers = [each["metadata"]["name"].startswith("verifier-") for each in jobs]
    assert sorted(verifiers) == [False] * 10 + [True] * 10  # each in its task's image, and one to score it
    assert ["tests.tar.gz" in each["data"] for each in secrets].count(True) == 10
    assert all(("tests.tar.gz" in each["data"]) == ("payload.json" not in each["data"]) for each in secrets)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_four_tasks_in_two_images_on_agentcore(examples, made, tmp_path, storage, local_keys):
    made.make_tasks(tmp_path / "tasks")
    found, folders = {}, {}
    for i, task in enumerate(sorted((tmp_path / "tasks").iterdir())):
        image = f"000000000000.dkr.ecr.us-east-1.amazonaws.com/tasks:{'ab'[i % 2]}"
        with (task / "task.toml").open("a") as file:
            file.write(f'\n[environment]\ndocker_image = "{image}"\n')
        folder = folders.setdefault(image, tmp_path / f"image-{'ab'[i % 2]}")
        shutil.copytree(task / "environment", folder, dirs_exist_ok=True)
        # Each container has the image's files in a separate folder.
        agent = examples / "swe_agent" / "agent.py"
        start = f"cd $(mktemp -d) && cp -r {folder}/. . && exec {sys.executable} {agent}"
        found[image] = ("sh", "-c", start)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**storage.environ, "PATH": path, "PYTHONPATH": str(examples.parent), "TMPDIR": str(tmp_path)}
    control = ControlLimits(transition_s=1.0, invisible_s=0.5, keeps_runtimes_with_sessions=True)
    with ScriptedEngine(script(made.BUGS)) as engine:
        local = LocalRuntime(
            examples / "swe_agent" / "agent.py",
            run_dir=tmp_path / "cloud",
            env=env,
            images=found,
            control=control,
            preload=False,
        )
        async with local:
            place = {name: getattr(local, name) for name in ("image", "role", "endpoint_url", "session_logs")}
            argv = in_cloud(examples / "swe_agent", "agentcore.yaml", engine, storage, max_sessions=4, **place)
            records = await run(argv, tmp_path, examples.parent, 4, **storage.environ)
            async with control_client("us-east-1", local.endpoint_url) as client:
                names = [each["agentRuntimeName"] async for each in list_runtimes(client)]
            sessions = await local.sessions()
    check_run(records, tmp_path, engine, made.BUGS)
    # The cloud's own runtime has a shorter name: it belongs to no image.
    assert len([each for each in names if re.fullmatch(r"rollout_agent_\w+_[0-9a-f]{8}", each)]) == len(found) == 2
    assert sessions["sessions"] == []
    assert sessions["counters"]["started"] == 4
