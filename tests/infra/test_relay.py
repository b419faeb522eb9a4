"""The relay's manifests: what they promise, and that they fit the relay and its page."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import typer
import yaml

from builders import run_config
from rollout_backend.config import load_config
from rollout_backend.model.relay.cli import KEY_ENV, serve
from rollout_backend.model.relay.relay_server import _KEEPALIVE_S
from rollout_backend.model.relay.relay_settings import RelaySettings
from tests.infra.conftest import INFRA, load_template

ROOT = Path(__file__).parents[2]
STACK = load_template(INFRA / "relay-ecs.yaml")
MANIFEST = {one["kind"]: one for one in yaml.safe_load_all((INFRA / "relay-kubernetes.yaml").read_text())}
PAGE = (ROOT / "docs" / "relay.md").read_text()


def options() -> set[str]:
    app = typer.Typer()
    app.command()(serve)
    return {option for parameter in typer.main.get_command(app).params for option in parameter.opts}


def given(args: list[Any]) -> dict[str, Any]:
    return dict(zip(args[::2], args[1::2], strict=True))


# --- Kubernetes -------------------------------------------------------------------------------------------


def test_there_is_one_relay_and_never_two() -> None:
    spec = MANIFEST["Deployment"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    service = STACK["Resources"]["Service"]["Properties"]
    assert service["DesiredCount"] == 1
    deployment = service["DeploymentConfiguration"]
    assert (deployment["MaximumPercent"], deployment["MinimumHealthyPercent"]) == (100, 0)


def test_the_pod_starts_the_relay_with_its_key() -> None:
    (container,) = MANIFEST["Deployment"]["spec"]["template"]["spec"]["containers"]
    (env,) = container["env"]
    assert env["name"] == KEY_ENV
    assert env["valueFrom"]["secretKeyRef"] == {"name": "rollout-relay", "key": "key"}
    args = given(container["args"])
    assert args.keys() <= options()
    (port,) = container["ports"]
    assert args["--port"] == str(port["containerPort"])
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    assert MANIFEST["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    assert MANIFEST["Service"]["spec"]["selector"] == MANIFEST["Deployment"]["spec"]["selector"]["matchLabels"]
    gibibytes = int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
    # A call holds up to 256 KiB in each direction, and the process itself less than 256 MiB.
    assert int(args["--max-calls"]) * 2 * 256 / 1024 < gibibytes * 1024 - 256


def test_the_pod_can_do_nothing_but_relay() -> None:
    pod = MANIFEST["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_only_the_training_side_comes_in_from_outside() -> None:
    (rule,) = MANIFEST["Ingress"]["spec"]["rules"]
    paths = [(path["path"], path["pathType"]) for path in rule["http"]["paths"]]
    assert paths == [("/relay", "Exact"), ("/health", "Exact")]
    assert MANIFEST["Ingress"]["spec"]["tls"][0]["hosts"] == [rule["host"]]


# --- the image --------------------------------------------------------------------------------------------


def test_the_image_holds_the_relays_imports_and_nothing_heavy(tmp_path: Path) -> None:
    dockerfile = (ROOT / "infra" / "relay.Dockerfile").read_text()
    for sources, target in re.findall(r"^COPY (.*) /relay/(.*)$", dockerfile, flags=re.M):
        for source in (ROOT / name for name in sources.split()):
            (tmp_path / target).mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, tmp_path / target, dirs_exist_ok=True)
            else:
                shutil.copy(source, tmp_path / target)
    code = (
        "import sys, rollout_backend.model.relay.__main__\n"
        "for name, module in sys.modules.items(): print(name, getattr(module, '__file__', None))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    ours = {name: file for name, file in loaded.items() if name.split(".")[0] in ("rollout_backend", "agent_wrapper")}
    assert [name for name, file in ours.items() if not file.startswith(str(tmp_path))] == []
    not_there = {"boto3", "httpx", "numpy", "ray", "renderers", "starlette", "transformers", "uvicorn", "yaml"}
    assert not_there & {name.partition(".")[0] for name in loaded} == set()


# --- ECS --------------------------------------------------------------------------------------------------


def test_the_task_has_its_key_and_no_role() -> None:
    task = STACK["Resources"]["Task"]["Properties"]
    assert "TaskRoleArn" not in task
    (container,) = task["ContainerDefinitions"]
    assert container["Secrets"] == [{"Name": KEY_ENV, "ValueFrom": {"Ref": "Key"}}]
    assert "Environment" not in container
    args = given(container["Command"])
    assert args.keys() <= options()
    assert args["--port"] == str(container["PortMappings"][0]["ContainerPort"])


def test_nothing_but_tls_comes_in_and_from_two_places() -> None:
    resources = STACK["Resources"]
    rules = resources["BalancerGroup"]["Properties"]["SecurityGroupIngress"]
    assert {(rule["FromPort"], rule["ToPort"], rule["CidrIp"]["Ref"]) for rule in rules} == {
        (443, 443, "TrainerCidr"),
        (443, 443, "AgentCidr"),
    }
    assert "SecurityGroupIngress" not in resources["TaskGroup"]["Properties"]
    to_task = resources["BalancerToTask"]["Properties"]
    assert (to_task["SourceSecurityGroupId"], to_task["FromPort"]) == ({"Ref": "BalancerGroup"}, 8080)
    assert resources["Listener"]["Properties"]["Protocol"] == "HTTPS"
    assert resources["Listener"]["Properties"]["DefaultActions"][0]["Type"] == "fixed-response"
    (condition,) = resources["ListenerRule"]["Properties"]["Conditions"]
    assert condition["PathPatternConfig"]["Values"] == ["/v1/*", "/s/*", "/relay", "/health"]


def test_the_execution_role_reads_only_the_relays_key() -> None:
    (policy,) = STACK["Resources"]["ExecutionRole"]["Properties"]["Policies"]
    by_sid = {statement["Sid"]: statement for statement in policy["PolicyDocument"]["Statement"]}
    assert by_sid["Key"]["Resource"] == {"Ref": "Key"}
    assert by_sid["Logs"]["Resource"] == {"Fn::GetAtt": "LogGroup.Arn"}
    assert [sid for sid, statement in by_sid.items() if statement["Resource"] == "*"] == ["Registry"]


def test_the_load_balancer_waits_longer_than_a_model_call() -> None:
    parameters = STACK["Parameters"]
    config = run_config()
    assert parameters["IdleSeconds"]["Default"] > config.timeouts.model_call_s
    assert parameters["IdleSeconds"]["MaxValue"] < _KEEPALIVE_S  # or it would use connections that are being closed
    assert parameters["MaxCalls"]["Default"] == RelaySettings.model_fields["max_calls"].default


# --- the page ---------------------------------------------------------------------------------------------


def test_the_page_describes_every_parameter() -> None:
    table = PAGE.partition("## The stack's parameters")[2].partition("## ")[0]
    told = set(re.findall(r"`([A-Z]\w+)`", " ".join(re.findall(r"^\| ([^|]*) \|", table, flags=re.M))))
    assert told == set(STACK["Parameters"])
    required = {name for name, parameter in STACK["Parameters"].items() if "Default" not in parameter}
    assert required <= set(re.findall(r"(\w+)=", PAGE))
    for output in re.findall(r"output `?([A-Z]\w+)", PAGE):
        assert output in STACK["Outputs"]


def test_the_pages_settings_can_be_loaded_and_its_options_exist(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yml\n(.*?)^```", PAGE, flags=re.M | re.S)
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert load_config(path, env={KEY_ENV: "k" * 32}).relay is not None
    named = set(re.findall(r"`(--[a-z-]+)`", PAGE)) | set(
        re.findall(
            r"(--[a-z-]+)", next(line for line in PAGE.splitlines() if "-m rollout_backend.model.relay" in line)
        )
    )
    assert len(named) >= 6
    assert named <= options()
