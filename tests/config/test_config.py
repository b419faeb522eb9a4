import json
import os
import re

import pytest

from builders import run_config
from rollout_backend.config import GatewayConfig, GroupConfig, ModelConfig, RolloutConfig, load_config
from rollout_backend.config.runtimes import RUNTIME_KINDS
from rollout_backend.errors import ConfigError

ARN = "arn:aws:bedrock-agentcore:us-east-1:123456789012:runtime/my_agent-a1B2c3D4e5"
MINIMAL = {
    "model": {"path": "/models/SmolLM2"},
    "storage": {"bucket": "rollouts"},
    "runtime": {"kind": "agentcore", "arn": ARN},
}


def refused(match: str, **sections) -> None:
    with pytest.raises(ConfigError, match=match):
        load_config(base={**MINIMAL, **sections}, env={})


def test_later_sources_win(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("group: {size: 2, policy: strict}\nstorage: {bucket: from-file}\n")
    config = load_config(
        file,
        overrides=["group.size=8", "serving.extra_args=[--a, '1']"],
        env={"ROLLOUT__GROUP__SIZE": "4", "ROLLOUT__RUN_ID": "by-env", "HOME": "/x"},
        base=MINIMAL,
        top={"storage": {"bucket": "from-top"}, "runtime": {"kind": "http", "url": "http://x"}},
    )
    assert config.runtime.kind == "http", "a runtime of another kind replaces the one below"
    assert config.group == GroupConfig(size=8, policy="strict")
    assert config.run_id == "by-env"
    assert config.storage.bucket == "from-top"
    assert config.serving.extra_args == ("--a", "1")


@pytest.mark.parametrize(
    ("given", "s3", "sqs"),
    [
        ({}, "http://env-s3", "http://env-sqs"),
        ({"s3_endpoint_url": "http://file"}, "http://file", "http://env-sqs"),
        ({"endpoint_url": "http://all"}, "http://all", "http://all"),
    ],
)
def test_the_endpoints_of_aws_clients_are_those_of_the_run(given, s3, sqs):
    env = {"AWS_ENDPOINT_URL_S3": "http://env-s3", "AWS_ENDPOINT_URL_SQS": "http://env-sqs"}
    aws = load_config(base={**MINIMAL, "aws": given}, env=env).aws
    assert (aws.endpoint_of("s3"), aws.endpoint_of("sqs")) == (s3, sqs)


IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/team/my-agent:git-0123abc"
ROLE = "arn:aws:iam::123456789012:role/agent"


def by_image(**more: object) -> dict[str, object]:
    return {"kind": "agentcore", "image": IMAGE, "role": ROLE, **more}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"storage": {"bucket": "b-1", "bukcet": "x"}, "group": {"size": 0}},
            r"storage\.bukcet: no such[\s\S]*group\.size",
        ),
        ({"storge": {}, "model": {}}, r"model\.path: is missing[\s\S]*storge: no such setting"),
        ({"storage": {"bucket": "s3://my-bucket"}}, "must be the bucket's name alone"),
        ({"storage": {"bucket": "b-1", "prefix": "/a/"}}, r"storage\.prefix"),
        ({"group": {"size": 4, "min_viable": 5}}, "min_viable=5 is more than size=4"),
        ({"timeouts": {"model_call_s": 1800}}, r"model_call_s \(1800\) is not below agent_s \(1800\)"),
        ({"timeouts": {"agent_s": 3590}}, r"agent_s \+ publish_grace_s \(3710\) is not below collection_s \(3600\)"),
        ({"timeouts": {"collection_s": 5400}}, r"collection_s \(5400\) is not below session_key_s \(5400\)"),
        ({"serving": {"kind": "external"}}, "urls belong to kind=external"),
        ({"serving": {"urls": ["http://x"]}}, "urls belong to kind=external"),
        (
            {"serving": {"engine": "vllm"}, "router": {"policy": "random"}},
            r"router\.policy=random has no effect with serving\.engine=vllm",
        ),
        ({"queue": {"url": "https://sqs.us-east-1.amazonaws.com/0/q.fifo"}}, r"queue\.url: names a FIFO queue"),
        ({"queue": {"url": "arn:aws:sqs:us-east-1:0:q"}}, r"queue\.url: is no URL"),
        ({"queue": {"wait_s": False}}, r"queue\.wait_s: is false \(YAML reads "),
        ({"prices": {"session_gb": 1}}, "set both session_vcpus and session_gb"),
        ({"prices": {"gpu_hour": 1}, "serving": {"kind": "external", "urls": ["http://e"]}}, r"needs prices\.gpus"),
        ({"prices": {"gpu_hour": -1}}, r"prices\.gpu_hour"),
    ],
)
def test_settings_that_make_no_run_are_refused(sections, message):
    refused(message, **sections)
    with pytest.raises(ConfigError, match=r"model: is missing; a training takes model\.path from verl: add -o model"):
        load_config(base={}, env={})


def test_a_runtime_from_an_image_needs_little():
    runtime = load_config(base={**MINIMAL, "runtime": by_image()}, env={}).runtime
    assert (runtime.region, runtime.qualifier) == ("eu-west-1", "DEFAULT")
    assert runtime.runtime_name.startswith("rollout_my_agent_")
    assert load_config(base=MINIMAL, env={}).runtime.region == "us-east-1"


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        ({"kind": "agentcore"}, "set arn.* or image"),
        (
            {"kind": "agentcore", "arn": ARN + "/runtime-endpoint/DEFAULT"},
            r"runtime\.arn: .* arn:aws:bedrock-agentcore:REGION:ACCOUNT:runtime/",
        ),
        (by_image(arn=ARN), "one of the two"),
        ({"kind": "agentcore", "image": IMAGE}, "image needs role"),
        (
            {"kind": "agentcore", "arn": ARN, "role": ROLE, "subnets": ["subnet-01234567"]},
            "role, subnets belong to image",
        ),
        (by_image(image="python:3"), r"runtime\.image: .* is not an image in ECR"),
        (by_image(role="agent"), r"runtime\.role: .* arn:aws:iam::ACCOUNT:role/NAME"),
        (by_image(name="my-agent"), r"runtime\.name: .* a letter, then at most 47"),
        (by_image(subnets=["subnet-01234567"]), "subnets and security_groups belong together"),
        (by_image(subnets=["vpc-01234567"], security_groups=["sg-01234567"]), r"runtime\.subnets: .* subnet-0123"),
        (by_image(environment={"A": "x" * 5001}), r"runtime\.environment: .* values of 5,000"),
        (by_image(idle_timeout_s=30), r"runtime\.idle_timeout_s: .* greater than or equal to 60"),
        (by_image(idle_timeout_s=3600, max_lifetime_s=1900), "idle_timeout_s must not be above max_lifetime_s"),
        (by_image(max_lifetime_s=1800), r"max_lifetime_s \(1800\) ends sessions before .*\(1920\)"),
        (by_image(qualifier="training"), "leave qualifier out"),
        ({"greeting": "hello"}, "kind is missing: it is one of agentcore, http, kubernetes, process, ray, or the"),
        ({"kind": "no_such_package.Config"}, "no_such_package"),
        ({"kind": "rollout_backend.config.load_config"}, "is not a subclass of RuntimeConfig"),
        ({"kind": "process", "app": "agent.py"}, r"runtime\.app: .*must be MODULE:NAME, such as agent:app"),
    ],
)
def test_settings_that_make_no_runtime_are_refused(runtime, message):
    refused(message, runtime=runtime)


def test_affinity_needs_a_policy_that_keeps_sessions_on_one_server():
    match = "affinity=group has no effect with policy=cache_aware"
    refused(match, router={"affinity": "group", "policy": "cache_aware"})
    vllm = {"serving": {"engine": "vllm"}, "router": {"affinity": "group"}}  # rendezvous hashing has it too
    assert load_config(base={**MINIMAL, **vllm}, env={}).router.affinity == "group"


# --- the model's context ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "tokens"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"max_position_embeddings": 262_144}, 32_768),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
    ],
)
def test_the_context_is_the_models_own_with_a_cap(tmp_path, written, tokens):
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert ModelConfig(path=tmp_path).context_tokens == tokens
    assert ModelConfig(path=tmp_path, context_length=100_000).context_tokens == 100_000


@pytest.mark.parametrize("written", [None, "{", '{"hidden_size": 8}'])
def test_a_model_without_a_context_length_needs_the_setting(tmp_path, written):
    if written is not None:
        (tmp_path / "config.json").write_text(written)
    with pytest.raises(ConfigError, match=r"model\.context_length is not set, and .*config\.json"):
        _ = ModelConfig(path=tmp_path).context_tokens


@pytest.mark.parametrize(
    "protocol", ["agentcore-rl-toolkit", "verl-4216", "agentcore-runtime-app", "sagemaker-job-runtime"]
)
def test_what_agents_of_another_protocol_cannot_do_is_refused(protocol):
    agents, keyed = {"agent_protocol": protocol}, {"key_in_path": True}
    runtime = {"kind": "http", "url": "http://agents", **agents}
    presigned = {"bucket": "b-1", "presigned": True}
    refused("presigned=false", runtime=runtime, gateway=keyed, storage=presigned)
    refused("agentcore or http", runtime={"kind": "process", "app": "agent:app", **agents}, gateway=keyed)
    if protocol == "verl-4216":  # its agents are sent no key, and must announce
        refused("key_in_path=true", runtime=runtime)
        refused("enabled=true", runtime=runtime, gateway=keyed, queue={"enabled": False})
    else:
        load_config(base={**MINIMAL, "runtime": runtime}, env={})
    config = load_config(base={**MINIMAL, "runtime": runtime, "gateway": keyed}, env={})
    assert config.uses_queue == (protocol == "verl-4216")


def test_a_wrong_value_names_its_source(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("group:\n  size: 0\n  policy: none\nqueue:\n  wait_s: 1\ntimeouts: {agent_s: -1}\n")
    overrides, env = ["queue.wait_s=-1"], {"ROLLOUT__GROUP__POLICY": "nothing"}
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides, env=env, base=MINIMAL)
    said = {line.split(":")[0].strip(): line for line in str(caught.value).splitlines()[1:]}
    assert said["group.size"].endswith(f"({file}:2)")
    assert said["group.policy"].endswith("(ROLLOUT__GROUP__POLICY)")
    assert said["queue.wait_s"].endswith("(-o queue.wait_s=-1)")
    assert said["timeouts.agent_s"].endswith(f"({file}:6)")


def test_keys_with_x_hold_anchors(tmp_path):
    (tmp_path / "c.yaml").write_text("x-common: &a {size: 5, policy: strict}\ngroup: {<<: *a, size: 7}\n")
    group = load_config(tmp_path / "c.yaml", base=MINIMAL, env={}).group
    assert (group.size, group.policy) == (7, "strict")


def test_a_setting_that_is_set_twice_is_refused(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("group:\n  size: 4\nqueue: {}\ngroup:\n  size: 8\n")
    with pytest.raises(ConfigError, match=r"config\.yaml:4: group is set a second time, after line 1"):
        load_config(file, base=MINIMAL)


def test_a_file_or_an_override_that_cannot_be_read(tmp_path):
    file = tmp_path / "c.yaml"
    with pytest.raises(ConfigError, match="cannot read the settings"):
        load_config(file, env={})
    for content, match in (("a: [", "is not YAML"), ("- 1", "must hold a map"), ("a: &a {b: *a}", "is not YAML")):
        file.write_text(content)
        with pytest.raises(ConfigError, match=match):
            load_config(file, env={})
    with pytest.raises(ConfigError, match=r"must look like key\.key=value"):
        load_config(base=MINIMAL, env={}, overrides=["group.size"])
    with pytest.raises(ConfigError, match="the value of ROLLOUT__GATEWAY__SECRET is not YAML") as caught:
        load_config(base=MINIMAL, env={"ROLLOUT__GATEWAY__SECRET": "*secret"})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("run_id", ["2026-11-27", "2026-27-11"])
def test_a_date_is_a_text(tmp_path, run_id):
    file = tmp_path / "c.yaml"
    file.write_text(f"run_id: {run_id}")
    assert load_config(file, base=MINIMAL, env={}).run_id == run_id
    assert load_config(base=MINIMAL, env={"ROLLOUT__RUN_ID": run_id}).run_id == run_id


def test_a_variable_with_single_underscores_is_refused_with_the_right_one():
    with pytest.raises(ConfigError, match="ROLLOUT_GROUP_SIZE sets nothing: write ROLLOUT__GROUP__SIZE"):
        load_config(base=MINIMAL, env={"ROLLOUT_GROUP_SIZE": "4", "ROLLOUT_MODEL": "m", "ROLLOUT_CACHE": "x"})


def test_a_home_is_expanded_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    tree = {**MINIMAL, "model": {"path": "~/model"}, "output_dir": "~/runs", "serving": {"python": "~/bin/python"}}
    config = load_config(base=tree, env={})
    assert [str(each) for each in (config.model.path, config.output_dir, config.serving.python)] == [
        "/home/me/model", "/home/me/runs", "/home/me/bin/python",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"output_dir: ~nobody-here/x names the home of a user"):
        load_config(base={**MINIMAL, "output_dir": "~nobody-here/x"}, env={})


def test_no_setting_is_checked_by_a_pattern_that_its_error_would_show():
    """pydantic's own message of `pattern=` is a regular expression; `matching` names the form in words."""
    schemas = [RolloutConfig.model_json_schema(mode="validation")]
    schemas += [kind.model_json_schema() for kind in RUNTIME_KINDS.values()]
    assert len(schemas) > 4
    assert '"pattern":' not in json.dumps(schemas)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("relay.url=https://relay", "relay.url: 'https://relay' is not a URL of the form wss://HOST or ws://HOST"),
        (
            "observe.otlp_endpoint=collector:4318",
            "'collector:4318' is not a URL that begins with http:// or https://",
        ),
        (
            "aws.endpoint_url=localhost:4566",
            "aws.endpoint_url: 'localhost:4566' is not a URL that begins with http://",
        ),
        ("aws.endpoint_url=http://host:PORT", "'http://host:PORT' names no host, or no port from 1 to 65535"),
        ("serving.urls=[http://host:99999]", "serving.urls.0: 'http://host:99999' names no host, or no port"),
        ("gateway.public_url=http://[::1", "'http://[::1' names no host"),
        ("gateway.public_url=https://.example.com", "'https://.example.com' names no host"),
        ("relay.url=wss://host:PORT", "relay.url: 'wss://host:PORT' names no host"),
        ("scoring.function=score.py", "'score.py' is not of the form FILE.py:NAME or module:NAME"),
        ("run_id=a/b", "run_id: 'a/b' is not "),
        ("runtime.working_dir=x", "runtime.working_dir: no such setting; another runtime.kind has it"),
        ("gateway=", "gateway: must be a map of settings, and is empty"),
        ("run_id=123", "run_id: must be a string, and YAML reads it as a number: put it in quotes"),
        ("output_dir=123", "output_dir: must be a string, and YAML reads it as a number: put it in quotes"),
    ],
)
def test_a_value_of_another_form_is_refused_in_words(setting, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(base=MINIMAL, overrides=[setting], env={})


@pytest.mark.parametrize(
    ("gateway", "sessions", "cores", "processes"),
    [
        ({}, 5000, 64, 5),
        ({}, 1024, 64, 1),
        ({}, 5000, 4, 3),
        ({}, 5000, 1, 1),
        ({"kind": "ray"}, 5000, 2, 5),
        ({"port": 65534}, 5000, 64, 2),
        ({"public_url": "https://gateway.example.com"}, 5000, 64, 1),
        ({"public_url": "https://gateway-{shard}.example.com"}, 5000, 64, 5),
    ],
)
def test_the_number_of_gateways_follows_from_the_sessions_and_the_cores(gateway, sessions, cores, processes):
    assert GatewayConfig(processes="auto", **gateway).sized(sessions, cores).processes == processes
    assert GatewayConfig(processes=7).sized(sessions, cores).processes == 7


def test_a_run_has_a_number_of_gateways(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    assert (
        run_config(
            gateway={"processes": "auto"}, runtime={"kind": "http", "url": "http://x", "max_sessions": 2000}
        ).gateway.processes
        == 2
    )
    with pytest.raises(ConfigError, match="must be at least 1, or auto"):
        run_config(gateway={"processes": 0})
