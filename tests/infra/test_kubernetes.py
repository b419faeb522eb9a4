"""The manifests that are applied, and those that the runtime creates, against the published schemas."""

from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from agent_wrapper.contract import PAYLOAD_VARIABLE, RolloutRequest
from kubernetes_bench import IMAGE, request_block
from rollout_backend.agents.runtimes.kubernetes.manifests import job_manifest, secret_manifest, verifier_manifest
from rollout_backend.agents.runtimes.kubernetes.runtime import RULES
from rollout_backend.config import KubernetesConfig
from rollout_backend.core.harbor import TaskContainer
from rollouts import make_rollout

ROOT = Path(__file__).parents[2]
VERSIONS = ("1.27", "1.37")  # the oldest with the label that pods get from their Job, and the newest
CONFIG = KubernetesConfig(
    image=IMAGE,
    requests={"cpu": "500m", "memory": "1Gi"},
    limits={"memory": "2Gi"},
    node_selector={"pool": "agents"},
    tolerations=({"key": "agents", "operator": "Exists", "effect": "NoSchedule"},),
    service_account="agent",
    keep_finished_s=300,
    image_pull_secrets=("registry",),
    environment={"HOUSE": "$1"},
    command=("/agent/bin/python", "agent.py", "$(HOME) costs $$5"),
)
TASK = TaskContainer(
    image="tasks/t:1", workdir="/src", env={"LANG": "C"}, resources={"cpu": "2000m", "memory": "4096Mi"}
)


def made() -> list[dict[str, Any]]:
    request = RolloutRequest.parse(request_block("rollout-1"))
    job = job_manifest(CONFIG, "rollout-1", request)
    of_task = job_manifest(CONFIG, "rollout-2", request, TASK)
    verifier = verifier_manifest(CONFIG, "verifier-3", make_rollout(), TASK, 600.0)
    return [job, of_task, verifier, secret_manifest(job, {"payload.json": b"{}"}, "0b1c")]


def applied() -> list[dict[str, Any]]:
    files = [ROOT / "infra" / name for name in ("kubernetes.yaml", "relay-kubernetes.yaml")]
    return [one for file in files for one in yaml.safe_load_all(file.read_text())]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "manifest", [*made(), *applied()], ids=lambda one: f"{one['kind']}-{one['metadata']['name']}"
)
def test_a_manifest_passes_the_schemas(manifest: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_a_jobs_settings_reach_its_pod() -> None:
    job, *_ = made()
    pod = job["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "agent"
    assert pod["automountServiceAccountToken"] is False
    assert pod["nodeSelector"] == {"pool": "agents"}
    assert pod["tolerations"] == [{"key": "agents", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    [container] = pod["containers"]
    assert container["resources"] == {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}
    assert {"name": "HOUSE", "value": "$$1"} in container["env"], "Kubernetes halves it again"
    assert (job["spec"]["backoffLimit"], job["spec"]["ttlSecondsAfterFinished"]) == (0, 300)


def test_a_task_has_its_image_and_its_resources_and_the_agents_files() -> None:
    _, job, verifier, _ = made()
    agents, verifiers = (each["spec"]["template"]["spec"] for each in (job, verifier))
    for pod in (agents, verifiers):
        [container], [copy] = pod["containers"], pod["initContainers"]
        assert (container["image"], container["workingDir"]) == ("tasks/t:1", "/src")
        assert container["resources"]["limits"] == {"memory": "4096Mi", "cpu": "2000m"}
        assert container["resources"]["requests"] == {"cpu": "2000m", "memory": "4096Mi"}
        assert {"name": "LANG", "value": "C"} in container["env"]
        assert copy["image"] == IMAGE
        mounted = {"name": "agent", "mountPath": "/agent", "subPath": "files", "readOnly": True}
        assert mounted in container["volumeMounts"]
        assert copy["command"][-1] == "/agent-copy/files", "only root may set the times of /agent-copy"
        assert pod["automountServiceAccountToken"] is False
    assert agents["containers"][0]["command"][1:] == ["agent.py", "$$(HOME) costs $$$$5"]
    assert PAYLOAD_VARIABLE not in str(verifiers)
    assert "/var/run/rollout" in verifiers["containers"][0]["command"]
    assert job["metadata"]["labels"].keys() == verifier["metadata"]["labels"].keys()
    components = [each["metadata"]["labels"]["app.kubernetes.io/component"] for each in (job, verifier)]
    assert components == ["agent", "verifier"]
    assert verifier["spec"]["activeDeadlineSeconds"] == 600 + 600 + 240


def test_ids_that_are_no_names_or_labels_are_replaced() -> None:
    block = request_block("A session/of another kind") | {"run_id": "r" * 100}
    job = job_manifest(CONFIG, "A session/of another kind", RolloutRequest.parse(block))
    kubernetes_validate.validate(job, VERSIONS[-1], strict=True)
    values = [job["metadata"]["name"], *job["metadata"]["labels"].values()]
    assert all(len(value) <= 63 and "/" not in value and " " not in value for value in values)


def test_the_namespace_of_the_file_is_the_default_of_the_setting() -> None:
    namespaced = [one for one in applied() if one["metadata"].get("namespace")]
    assert {one["metadata"]["namespace"] for one in namespaced} == {CONFIG.namespace}


def test_the_network_policy_excludes_every_private_range_and_admits_local_dns():
    [policy] = [each for each in applied() if each["kind"] == "NetworkPolicy"]
    blocks = [to["ipBlock"] for rule in policy["spec"]["egress"] for to in rule["to"] if "ipBlock" in to]
    assert [block for block in blocks if "except" not in block] == [{"cidr": "169.254.20.10/32"}]
    [public] = [block["except"] for block in blocks if "except" in block]
    for address in ("10.1.2.3", "100.64.0.1", "100.127.255.254", "172.31.0.1", "192.168.1.1", "169.254.169.254"):
        assert any(ip_address(address) in ip_network(each) for each in public)


def test_each_call_has_its_rule_in_the_role():
    [role] = [each for each in applied() if each["kind"] == "Role"]
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert set(RULES) <= granted
    assert granted - set(RULES) == {
        ("", "namespaces", "get"),
        ("", "serviceaccounts", "get"),
        ("", "pods/log", "get"),
    }
