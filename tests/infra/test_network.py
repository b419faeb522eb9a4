"""The network of agents and gateway: who reaches whom, and that its paths are the gateway's shards."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from builders import run_config
from rollout_backend.config import RolloutConfig
from rollout_backend.model.dialects.registry import DIALECTS
from rollout_backend.model.relay.forwarding import route as relay_route
from rollout_backend.model.serving.gateway_process import public_url
from rollout_backend.model.serving.run_secret import model_endpoint
from rollout_backend.workbench.deploy.image import DOCKERFILE
from rollouts import make_claims
from tests.infra.conftest import INFRA, Stack, load_template

NETWORK = load_template(INFRA / "network.yaml")
PROCESSES = 4


@pytest.fixture(scope="module")
def resources() -> dict[str, Any]:
    return {name: each["Properties"] for name, each in NETWORK["Resources"].items() if "Properties" in each}


class LoadBalancer:
    """The listener of the template, evaluated as by an Application Load Balancer, with its limits."""

    def __init__(self, resources: dict[str, Any]) -> None:
        self._resources = resources
        rules = [each for each in resources.values() if "Priority" in each]
        assert all(rule["ListenerArn"] == {"Ref": "Listener"} for rule in rules)
        self._rules = sorted(rules, key=lambda rule: rule["Priority"])

    def route(self, url: str) -> tuple[int, str] | None:
        """Return the port and the path at which a request arrives; None for the 404 of the listener."""
        target = urlsplit(url).path
        for rule in self._rules:
            [condition] = rule["Conditions"]
            assert condition["Field"] == "path-pattern"
            patterns = condition["PathPatternConfig"]["Values"]
            assert len(patterns) <= 3, "match evaluations per condition"
            assert len(re.findall(r"[*?]", "".join(patterns))) <= 5, "wildcards per rule"
            assert all(re.fullmatch(r"[A-Za-z0-9_.$/~\"'@:+&*?-]{1,128}", each) for each in patterns)
            if any(self._matches(pattern, target) for pattern in patterns):
                [rewrite] = rule["Transforms"][0]["UrlRewriteConfig"]["Rewrites"]
                [action] = rule["Actions"]
                group = self._resources[action["TargetGroupArn"]["Ref"]]
                assert group["Port"] == group["Targets"]["Fn::If"][1][0]["Port"]
                return group["Port"], re.sub(rewrite["Regex"], rewrite["Replace"].replace("$", "\\"), target)
        return None

    @staticmethod
    def _matches(pattern: str, path: str) -> bool:
        return bool(re.fullmatch("".join({"*": ".*", "?": "."}.get(each, re.escape(each)) for each in pattern), path))


def urls_of_run(config: RolloutConfig, shard: int) -> Iterator[str]:
    """Yield every URL that a run gives to agents, their clients or the reader, and those that clients derive."""
    claims = make_claims("s" * 60)
    for key_in_path in (False, True):
        public = public_url(config.gateway, shard, "")
        endpoint = model_endpoint(public, "model", "secret" * 8, claims, key_in_path=key_in_path)
        yield endpoint.trajectory_url
        assert endpoint.heartbeat_url is not None
        yield endpoint.heartbeat_url
        for base in (endpoint.base_url, f"{endpoint.base_url}/", f"{endpoint.base_url}/v1"):  # probes of clients
            yield base
        for base in (endpoint.base_url, f"{endpoint.base_url}/v1"):
            yield from (f"{base}/models", f"{base}/models/Qwen/Qwen3-4B")
            for dialect in DIALECTS:
                yield from (f"{base}{path}" for path in (dialect.path, dialect.count_path) if path is not None)
        yield f"{public}/health"  # rollout doctor, and the probe that it prints


@pytest.fixture
def config() -> RolloutConfig:
    outputs = NETWORK["Outputs"]
    url = outputs["PublicUrl"]["Value"]["Fn::Sub"].replace("${GatewayDomain}", "example.com")
    return run_config(gateway={"host": "0.0.0.0", "port": 8000, "processes": PROCESSES, "public_url": url})


def test_every_url_of_a_run_reaches_its_process_without_the_shard(resources, config):
    balancer = LoadBalancer(resources)
    for shard in range(PROCESSES):
        urls = list(urls_of_run(config, shard))
        assert len(urls) > 30
        expected = {url: (8000 + shard, urlsplit(url).path.removeprefix(f"/s/{shard}")) for url in urls}
        assert {url: balancer.route(url) for url in urls} == expected


def test_the_relay_forwards_every_url_of_a_run_that_is_a_call(config):
    for url in urls_of_run(config, 3):
        path = urlsplit(url).path
        if not path.endswith("/health"):
            assert relay_route(path) == ("3", path.removeprefix("/s/3"))


def test_everything_else_is_answered_by_the_load_balancer(resources):
    balancer = LoadBalancer(resources)
    for path in ("/", "/health", "/v1/models", "/control/revoke", "/s/0/control/revoke", "/s/0/", "/s/4/v1/models"):
        assert balancer.route(f"https://example.com{path}") is None
    assert resources["Listener"]["DefaultActions"][0]["FixedResponseConfig"] == {"StatusCode": "404"}
    assert (resources["Listener"]["Protocol"], resources["Listener"]["Port"]) == ("HTTPS", 443)


def test_nothing_reaches_an_agent_and_only_the_load_balancer_reaches_the_gateway(resources):
    agent = resources["AgentSecurityGroup"]
    assert "SecurityGroupIngress" not in agent
    assert [(rule["FromPort"], rule["ToPort"]) for rule in agent["SecurityGroupEgress"]] == [(443, 443)]
    [calls] = resources["TrainerSecurityGroup"]["SecurityGroupIngress"]
    assert calls["SourceSecurityGroupId"] == {"Ref": "LoadBalancerSecurityGroup"}
    assert (calls["FromPort"], calls["ToPort"]) == (8000, 8000 + PROCESSES - 1)
    # In the whole network, the names of the services lead to the endpoints.
    endpoints = resources["EndpointSecurityGroup"]["SecurityGroupIngress"]
    groups = [rule["SourceSecurityGroupId"]["Ref"] for rule in endpoints]
    assert groups == ["AgentSecurityGroup", "TrainerSecurityGroup"]


@pytest.mark.parametrize(
    ("parameters", "sources"),
    [
        ({}, ["192.0.2.7/32"]),
        ({"AgentCidr": "0.0.0.0/0"}, ["192.0.2.7/32", "0.0.0.0/0"]),
        ({"Internet": "false"}, []),
    ],
)
def test_only_the_networks_own_nat_reaches_the_load_balancer_unless_opened(parameters, sources):
    network = Stack(NETWORK, {"NatAddress": "192.0.2.7"}, **parameters)
    rules = network.property("LoadBalancerSecurityGroup", "SecurityGroupIngress")
    assert [rule["CidrIp"] for rule in rules] == sources
    assert all((rule["FromPort"], rule["ToPort"]) == (443, 443) for rule in rules)


@pytest.mark.parametrize("internet", ["true", "false"])
def test_the_trainer_reaches_the_internet_and_agents_only_with_internet(internet):
    """AgentCore and Session Manager have no endpoint here, and the trainer downloads packages and models."""
    resources = NETWORK["Resources"]
    made = {
        name: each.get("Properties", {})
        for name, each in resources.items()
        if internet == "true" or each.get("Condition") != "HasInternet"
    }
    tables = {
        each["SubnetId"]["Ref"]: each["RouteTableId"]["Ref"]
        for name, each in made.items()
        if resources[name]["Type"] == "AWS::EC2::SubnetRouteTableAssociation"
    }
    gateways = {
        each["RouteTableId"]["Ref"]: each["NatGatewayId"]["Ref"]
        for name, each in made.items()
        if resources[name]["Type"] == "AWS::EC2::Route" and "NatGatewayId" in each
    }
    assert made[gateways[tables["TrainerSubnet"]]]["SubnetId"] == {"Ref": "PublicSubnet0"}
    for agents in ("PrivateSubnet0", "PrivateSubnet1"):
        assert (tables[agents] in gateways) == (internet == "true")
    assert [each["Ref"] for each in made["S3Endpoint"]["RouteTableIds"]] == [
        tables["PrivateSubnet0"],
        tables["TrainerSubnet"],
    ]


def test_the_package_holds_the_images_files():
    assert DOCKERFILE.read_text() == (INFRA / DOCKERFILE.name).read_text()
