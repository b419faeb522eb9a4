"""Folders of Harbor tasks as task files."""

import base64
import re

import pytest

from agent_wrapper.shared.workspace import unpack_folder
from rollout_backend.config import AgentCoreConfig, KubernetesConfig, ProcessConfig
from rollout_backend.core.harbor import CONTAINER_FIELD, describe_ignored, fit_to_runtime
from rollout_backend.core.tasks import Task, check_private, read_tasks
from rollout_backend.errors import ConfigError, TaskFileError

TOML = 'version = "1.0"\n[verifier]\ntimeout_sec = 30\nenv = { MODE = "${HARBOR_MODE:-strict}" }\n'


@pytest.fixture
def make(tmp_path):
    def make(name="fix-sum", toml=TOML, **files):
        written = {
            "task.toml": toml,
            "instruction.md": "Fix it.\n",
            "environment/Dockerfile": "FROM python:3.12\nWORKDIR /repository\n",
            "environment/sum.py": "print(1)\n",
            "solution/solve.sh": "the answer",
            "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        }
        for path, text in {**written, **files}.items():
            file = tmp_path / "tasks" / name / path
            if text is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
        return f"harbor:{tmp_path / 'tasks'}"

    return make


def unpacked(text, folder):
    unpack_folder(base64.b64decode(text), folder)
    return {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_agent_gets_instruction_and_environment_and_the_scorer_the_tests(make, tmp_path):
    mark = "\ufeff"
    docker = {"environment/Dockerfile": f"{mark}FROM python:3.12\nWORKDIR /repository\n"}
    make("b", f"{mark}{TOML}", **{"instruction.md": f"{mark}Fix it.\n"}, **docker)
    (one, other) = read_tasks(make("a"))
    assert (one.task_id, other.task_id) == ("a", "b")
    assert (one.payload, one.private) == (other.payload, other.private)  # archives do not depend on times
    assert one.payload["instruction"] == "Fix it.\n"
    assert unpacked(one.payload["environment"], tmp_path / "environment") == {"sum.py": "print(1)\n"}
    private = dict(one.private["harbor"])
    assert set(unpacked(private.pop("tests"), tmp_path / "tests-of-a")) == {"test.sh"}
    assert private == {
        "timeout_s": 30.0,
        "env": {"MODE": "${HARBOR_MODE:-strict}"},
        "workdir": "/repository",
        "container": {},
    }
    assert one.agent_s is None
    assert read_tasks(f"{make()}/b") == (other,)  # one task is a folder of tasks too
    with pytest.raises(TaskFileError, match="has no Harbor task"):
        read_tasks(f"harbor:{tmp_path}")


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[[steps]]\nname = 'first'", "steps in task.toml is not supported"),
        ("[environment]\ndocker_image = 'a b'", "environment.docker_image is 'a b', which is no name of an image"),
        ("[environment]\nmemory_mb = '2G'", "environment.memory_mb is '2G', not a number of megabytes"),
        ("[environment]\nstorage = 'much'", "environment.storage is 'much', not a size such as 2G"),
        ("[environment]\nenv = { KEY = '${NOT_SET_ANYWHERE}' }", r"\$NOT_SET_ANYWHERE, which is not set"),
        ("[agent]\ntimeout_sec = 0", "agent.timeout_sec is 0, not a number of seconds"),
        ("[environment]\nallow_internet = false", "the agent's network is that of its runtime"),
        ("[agent]\nnetwork_mode = ['public']", "allow_internet or network_mode in task.toml is not supported"),
        ("[verifier]\nnetwork_mode = 'allowlist'", "the agent's network is that of its runtime"),
        ("[environment]\nskills_dir = '/skills'", "environment.skills_dir in task.toml is not supported"),
        ("[environment]\nos = 'windows'", "needs Windows"),
        ("[verifier]\nenv = { KEY = 3 }", "verifier.env must be a table of strings"),
        ("[environment]\nworkdir = 'here'", "environment.workdir is 'here', not an absolute path"),
        ("verifier = 3", "verifier in task.toml is not a table"),
        ("[", "the Harbor task .*fix-sum: "),
    ],
)
def test_a_task_that_cannot_run_is_refused_by_name(make, toml, message):
    with pytest.raises(TaskFileError, match=message):
        read_tasks(make(toml=toml))


def test_all_tasks_that_cannot_run_are_named_and_can_be_left_out(make, caplog):
    make("gpus", "[environment]\ngpus = 1")
    make("no tests")
    folder = make("steps", "[[steps]]\nname = 'first'")
    with pytest.raises(TaskFileError) as caught:
        read_tasks(folder)
    assert [
        word for word in ("gpus: env", "no tests: task_id", "steps: steps") if word not in str(caught.value)
    ] == []
    assert "name the folder as" not in str(caught.value)
    supported = folder.replace("harbor:", "harbor-supported:")
    with pytest.raises(TaskFileError, match="it needs GPUs"):
        read_tasks(supported)
    make("good")
    with pytest.raises(TaskFileError, match=f"To run the other 1, name the folder as {supported}$"):
        read_tasks(folder)
    assert [task.task_id for task in read_tasks(supported)] == ["good"]
    assert "3 of 4 tasks are left out" in caplog.text


def test_tasks_that_the_runtime_cannot_run_are_named_and_left_out_too(make, caplog):
    make("good")
    folder = make("own-image", "[environment]\ndocker_image = 'python:3.12'")
    supported = folder.replace("harbor:", "harbor-supported:")
    process = ProcessConfig(command="run")
    assert [task.task_id for task in read_tasks(supported, process)] == ["good"]
    assert "'own-image' needs a container" in caplog.text
    with pytest.raises(TaskFileError, match=rf"'own-image' needs a container .*\n.*name the folder as {supported}$"):
        read_tasks(folder, process)
    assert len(read_tasks(folder)) == len(read_tasks(supported)) == 2


DOCKERFILES = {
    "RUN make": "/app",
    "WORKDIR /a\nWORKDIR b/../c\n  workdir d/": "/a/c/d",
    "ENV HOME=/root A=$B\nWORKDIR $HOME/x": "/root/x",
    "ENV HOME /my root\nWORKDIR ${HOME}": "/my root",
    "ARG D=/opt\nENV E=${D}/e\nWORKDIR ${E:-/no}/y": "/opt/e/y",
    "ENV D=/env\nARG D=/arg\nWORKDIR $D": "/env",
    "ENV E=\nWORKDIR ${E:-/default}": "/default",
    'WORKDIR "/with space"': "/with space",
    "WORKDIR\t'/a'": "/a",
    "WORKDIR /a\nRUN echo \\\n# comment\n  WORKDIR /b": "/a",
    "WORKDIR /a\nRUN <<EOF cat\nWORKDIR /b\nEOF\nENV X=1": "/a",
    "WORKDIR /a\nRUN cat <<<EOF\nWORKDIR /b": "/b",
    "WORKDIR /a\nFROM debian\nRUN make": "/app",
    "ENV R=/a\nWORKDIR $R\nFROM 0 AS next\nWORKDIR $R/b\nFROM --platform=x next\nWORKDIR c": "/a/b/c",
}


@pytest.mark.parametrize(("lines", "workdir"), DOCKERFILES.items())
def test_the_working_directory_is_that_of_the_dockerfiles_last_stage(make, lines, workdir):
    dockerfile = f"ARG G=/global\nFROM debian AS 0\nARG G\n{lines}\n"
    (task,) = read_tasks(make(**{"environment/Dockerfile": dockerfile}))
    assert task.private["harbor"]["workdir"] == workdir


@pytest.mark.parametrize(
    "lines",
    [
        "WORKDIR app",
        "WORKDIR $HOME/x",
        "ARG D\nWORKDIR /a/$D",
        "ARG D=/a\nFROM debian\nWORKDIR $D",
        "WORKDIR ${D:+/a}",
        "WORKDIR /a/\\$b",
        'WORKDIR /a"b"',
    ],
)
def test_a_working_directory_that_is_not_known_is_refused(make, lines):
    dockerfile = f"FROM debian\n{lines}\n"
    with pytest.raises(TaskFileError, match=r"WORKDIR .* set environment\.workdir in task\.toml"):
        read_tasks(make(**{"environment/Dockerfile": dockerfile}))
    toml = "[environment]\nworkdir = '/known'"
    (task,) = read_tasks(make(toml=toml, **{"environment/Dockerfile": dockerfile}))
    assert task.private["harbor"]["workdir"] == "/known"


def test_a_task_without_a_file_is_refused(make):
    for file, message in (("tests/test.sh", "no tests/test.sh"), ("instruction.md", "No such")):
        with pytest.raises(TaskFileError, match=message):
            read_tasks(make(file.replace("/", "-"), **{file: None}))


def kubernetes(**more):
    return KubernetesConfig(image="agent:1", **{"command": "run", "task_image": "r.io/tasks/{task}:2", **more})


def test_on_kubernetes_a_task_runs_in_its_own_image(make, monkeypatch):
    monkeypatch.setenv("REGION", "eu")
    toml = """[agent]
timeout_sec = 120
[environment]
cpus = 0.5
memory = "2G"
storage_mb = 512
workdir = "/src"
env = { REGION = "${REGION}" }
"""
    tasks = read_tasks(make("Fix-Sum", toml))
    (task,) = fit_to_runtime(tasks, kubernetes())
    assert task.payload == {
        "instruction": "Fix it.\n",
        "environment": ".",
        CONTAINER_FIELD: {
            "image": "r.io/tasks/fix-sum:2",
            "workdir": "/src",
            "env": {"REGION": "eu"},
            "resources": {"cpu": "500m", "memory": "2048Mi", "ephemeral-storage": "512Mi"},
        },
    }
    assert "tests" not in str(task.payload)
    assert task.agent_s == 120
    assert fit_to_runtime([task], kubernetes()) == (task,)  # as read from a run's folder
    (named,) = fit_to_runtime(
        read_tasks(make("Fix-Sum", "[environment]\ndocker_image = 'a.io:5000/b/c:1'")), kubernetes()
    )
    assert named.payload[CONTAINER_FIELD]["image"] == "a.io:5000/b/c:1"
    plain = Task("t", {"environment": "x"})
    assert fit_to_runtime([plain], kubernetes(command=())) == (plain,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task_image": None}, r"'fix-sum' names no image: build its environment/, push the image, and set"),
        ({"task_image": "a//{task}"}, r"runtime.task_image gives 'a//fix-sum' for the Harbor task 'fix-sum'"),
        ({"command": ()}, r"set runtime.command to the agent's command"),
    ],
)
def test_on_kubernetes_what_a_task_needs_is_named(make, settings, message):
    with pytest.raises(ConfigError, match=message):
        fit_to_runtime(read_tasks(make()), kubernetes(**settings))


def test_tests_that_no_secret_holds_are_refused(make, monkeypatch):
    monkeypatch.setattr("rollout_backend.config.KubernetesConfig.max_tests_bytes", 100)
    with pytest.raises(ConfigError, match=r"tests/ of the Harbor task 'fix-sum' has .* bytes compressed"):
        fit_to_runtime(read_tasks(make()), kubernetes())


ECR = "123456789012.dkr.ecr.us-east-1.amazonaws.com"


def agentcore(**more):
    return AgentCoreConfig(image=f"{ECR}/agent:1", role="arn:aws:iam::123456789012:role/r", **more)


@pytest.mark.parametrize(
    ("toml", "template", "image"),
    [
        ("", None, None),  # runs in the agent's image
        ("", f"{ECR}/tasks:{{task}}", f"{ECR}/tasks:fix-sum"),
        (f"docker_image = '{ECR}/own:1'", f"{ECR}/tasks:{{task}}", f"{ECR}/own:1"),
        (f"docker_image = '{ECR}/own:1'", None, f"{ECR}/own:1"),
        ("docker_image = 'swebench/x:latest'", f"{ECR}/tasks:{{task}}", f"{ECR}/tasks:fix-sum"),
    ],
)
def test_on_agentcore_a_task_runs_in_its_image_in_ecr(make, toml, template, image):
    (task,) = fit_to_runtime(read_tasks(make(toml=f"[environment]\n{toml}")), agentcore(task_image=template))
    container = task.payload.get(CONTAINER_FIELD)
    assert (container and container["image"]) == image
    assert (task.payload["environment"] == ".") == (image is not None)


def test_on_agentcore_what_makes_the_runtime_and_the_folder(make):
    toml = f"[environment]\ndocker_image = '{ECR}/a:1'\nmemory = '16G'\nworkdir = '/src'\nenv = {{ A = 'b' }}"
    (task,) = fit_to_runtime(read_tasks(make(toml=toml)), agentcore())
    container = {"image": f"{ECR}/a:1", "workdir": None, "env": {"A": "b"}, "resources": {"memory": "16384Mi"}}
    assert task.payload[CONTAINER_FIELD] == container
    assert task.payload["environment"] == "/src"


@pytest.mark.parametrize("toml", ["docker_image = 'a/b'", "env = { A = 'b' }"])
def test_on_agentcore_an_image_elsewhere_is_refused(make, toml):
    with pytest.raises(ConfigError, match=r"'fix-sum' needs an image in ECR, .* set runtime.task_image"):
        fit_to_runtime(read_tasks(make(toml=f"[environment]\n{toml}")), agentcore())


@pytest.mark.parametrize("toml", ["docker_image = 'a/b'", "env = { A = 'b' }"])
def test_a_runtime_without_a_container_for_each_task_refuses_what_needs_one(make, toml):
    process = ProcessConfig(command="run")
    assert fit_to_runtime(read_tasks(make("plain")), process)
    name = toml.partition(" ")[0]
    with pytest.raises(ConfigError, match=rf"environment.{name} .* of the Harbor task 'fix-sum' needs a container"):
        fit_to_runtime(read_tasks(make(toml=f"[environment]\n{toml}")), process)


ARN = "arn:aws:bedrock-agentcore:us-east-1:123456789012:runtime/agent-0123456789"
PROVIDER = "arn:aws:bedrock-agentcore:us-east-1:123456789012:capacity-provider/mine-0123456789"


@pytest.mark.parametrize(
    ("runtime", "ignored"),
    [
        (ProcessConfig(command="run"), {"cpus": 2, "memory_mb": 2, "storage_mb": 1}),
        (AgentCoreConfig(arn=ARN), {"cpus": 1, "memory_mb": 1, "storage_mb": 1}),
        (agentcore(min_memory_mib=16384), {"cpus": 1, "storage_mb": 1}),
        (agentcore(min_memory_mib=16384, capacity_provider=PROVIDER), {}),
        (kubernetes(), {}),
    ],
)
def test_resources_that_a_runtime_does_not_provide_are_counted(make, runtime, ignored):
    make("small", "[environment]\ncpus = 2\nmemory = '8G'")
    tasks = read_tasks(make("large", "[environment]\ncpus = 4\nmemory = '16G'\nstorage = '20G'"))
    fit_to_runtime(tasks, runtime)
    said = describe_ignored(tasks, runtime)
    assert {name: int(number) for name, number in re.findall(r"environment\.(\w+) of (\d)", said)} == ignored
    assert describe_ignored([Task("t", {})], runtime) == ""


def test_on_agentcore_more_memory_than_a_session_has_is_refused_with_the_setting(make):
    tasks = read_tasks(make(toml="[environment]\nmemory = '16G'"))
    with pytest.raises(ConfigError, match=r"memory_mb=16384 .* 'fix-sum', .* set runtime.min_memory_mib=16384"):
        fit_to_runtime(tasks, agentcore())


def test_a_run_without_the_verifier_is_refused(make):
    with pytest.raises(ConfigError, match=r"set scoring.function=rollout_backend.run.scoring.harbor:verify"):
        check_private(read_tasks(make()), scored=False)
