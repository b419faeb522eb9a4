"""The template: what cfn-lint knows of AWS's own schemas, and the promises of least privilege that it does not."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from builders import run_config
from rollout_backend.base.aws import Identity
from rollout_backend.config import RuntimeConfig
from rollout_backend.run.checks.account import needed_permissions
from rollout_backend.run.collect import buffer
from rollout_backend.workbench.deploy.calls import BUILD, DEPLOY, DOWN
from tests.emulators.iam_proxy import Access, allowed
from tests.infra.conftest import INFRA, TEMPLATE

# Actions that AWS checks against no resource, so that "*" is the only thing that can be written.
NAMELESS = {
    "bedrock-agentcore:CreateAgentRuntime",
    "bedrock-agentcore:ListAgentRuntimes",
    "cloudwatch:PutMetricData",
    "ecr:GetAuthorizationToken",
    "sagemaker:ListTrainingSessions",
    "servicequotas:ListServiceQuotas",
    "sqs:ListQueues",
    "xray:GetSamplingRules",
    "xray:GetSamplingTargets",
    "xray:PutTelemetryRecords",
    "xray:PutTraceSegments",
}
OF_RESULTS = ("SignForResults", "WriteResults")  # where something else than the agent's wrapper writes results
RUNS = {"Fn::Sub": "${Bucket.Arn}/${ResultPrefix}runs/*"}
OF_AGENTS = [{"Fn::Sub": f"${{Bucket.Arn}}/${{ResultPrefix}}runs/*/{name}/*"} for name in ("steps", "artifacts")]
WRITE_ONCE = {"Null": {"s3:if-none-match": "false"}}
ACCOUNT = "arn:${AWS::Partition}:bedrock-agentcore:${AWS::Region}:${AWS::AccountId}"
RUN_QUEUES = {"Fn::Sub": "arn:${AWS::Partition}:sqs:${AWS::Region}:${AWS::AccountId}:rollout-*"}

Statement = dict[str, Any]


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def branches(value: Any) -> Iterator[Any]:
    """`value`, or everything that a condition could put in its place."""
    if isinstance(value, dict) and "Fn::If" in value:
        for branch in value["Fn::If"][1:]:
            yield from branches(branch)
    elif value != {"Ref": "AWS::NoValue"}:
        yield value


def statements(document: dict[str, Any]) -> list[Statement]:
    return [one for statement in document["Statement"] for one in branches(statement)]


def resources(statement: Statement) -> list[Any]:
    return [one for resource in listed(statement["Resource"]) for one in branches(resource)]


def actions(found: list[Statement]) -> set[str]:
    return {action for statement in found for action in listed(statement["Action"])}


def policy_of(resource: str) -> list[Statement]:
    """Return the statements of a managed policy, or of a role's only policy."""
    properties = TEMPLATE["Resources"][resource]["Properties"]
    (document,) = [each["PolicyDocument"] for each in properties.get("Policies", [properties])]
    return statements(document)


AGENT, TRAINER, DEPLOYER, BUILDER, SESSIONS = map(
    policy_of, ("AgentRole", "TrainerPolicy", "DeployerPolicy", "BuildRole", "TrainingSessionsPolicy")
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["template.yaml", "network.yaml", "relay-ecs.yaml"])
def test_cfn_lint_finds_nothing(name: str) -> None:
    program = Path(sys.executable).with_name("cfn-lint")  # its own process: it warns, and here warnings are errors
    argv = [str(program), "--include-checks", "I", "--format", "json", "--", str(INFRA / name)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (json.loads(done.stdout or "[]"), done.returncode) == ([], 0), done.stdout + done.stderr


def test_no_action_is_a_wildcard_and_a_resource_only_where_an_action_names_none():
    for statement in AGENT + TRAINER + DEPLOYER + BUILDER + SESSIONS:
        assert "*" not in "".join(listed(statement["Action"])), statement["Sid"]
        if "*" in resources(statement):
            assert set(listed(statement["Action"])) <= NAMELESS, statement["Sid"]


def test_an_agent_can_write_a_result_once_and_read_nothing() -> None:
    """Read access would reveal other rollouts' session ids, and a session id is enough to impersonate a session."""
    s3 = [statement for statement in AGENT if any(a.startswith("s3:") for a in listed(statement["Action"]))]
    assert actions(s3) == {"s3:PutObject"}  # no list, no delete
    (write,) = [statement for statement in s3 if statement["Sid"] != "WriteAReport"]
    assert resources(write) == OF_AGENTS
    assert write["Condition"] == WRITE_ONCE


ARNS = {name: f"arn:aws:none:::{name}" for name in ("Bucket", "Queue", "Repository", "AgentRole", "Runtime")}


def may_write(statements: list[Statement], folder: str, once: bool) -> bool:
    key = f"{ARNS['Bucket']}/runs/run-1/{folder}/00000000/a/b"
    return allowed(statements, Access("s3:PutObject", key, {"s3:if-none-match": "*"} if once else {}))


@pytest.mark.parametrize(
    ("protocol", "agent_writes", "announces", "trainer_writes"),
    [
        ("rollout", {("steps", True), ("artifacts", True)}, True, False),
        ("agentcore-rl-toolkit", {("agents", True), ("agents", False)}, False, True),
        ("agentcore-runtime-app", set(), False, True),
        ("sagemaker-job-runtime", set(), False, True),
        ("verl-4216", {("agents", True), ("agents", False)}, True, True),
    ],
)
def test_only_agents_of_another_protocol_may_write_reports(stack, protocol, agent_writes, announces, trainer_writes):
    made = stack(ARNS, AgentName="agent", AgentProtocol=protocol)
    places = [(folder, once) for folder in ("steps", "artifacts", "agents", "manifests") for once in (True, False)]
    assert {place for place in places if may_write(made.policy("AgentRole"), *place)} == agent_writes
    assert allowed(made.policy("AgentRole"), Access("sqs:SendMessage", ARNS["Queue"])) is announces
    assert may_write(made.policy("TrainerPolicy"), "steps", True) is trainer_writes
    assert not may_write(made.policy("TrainerPolicy"), "agents", True)


def test_agents_of_another_protocol_do_not_write_by_presigned_urls():
    rule = TEMPLATE["Rules"]["PresignedNeedsTheWrapper"]
    assert rule["RuleCondition"] == {"Fn::Equals": [{"Ref": "Presigned"}, "true"]}
    assert [one["Assert"] for one in rule["Assertions"]] == [{"Fn::Equals": [{"Ref": "AgentProtocol"}, "rollout"]}]
    allowed_values = TEMPLATE["Parameters"]["AgentProtocol"]["AllowedValues"]
    assert allowed_values == list(get_args(RuntimeConfig.model_fields["agent_protocol"].annotation))


def test_with_presigned_urls_the_trainer_signs_for_one_write_and_the_bucket_announces_it(stack):
    presigned, plain = (stack(ARNS, AgentName="agent", Presigned=value) for value in ("true", "false"))
    services = {action.partition(":")[0] for action in actions(presigned.policy("AgentRole"))}
    assert not services & {"s3", "sqs"}
    for folder in ("steps", "artifacts"):
        assert may_write(presigned.policy("TrainerPolicy"), folder, True)
        assert not may_write(presigned.policy("TrainerPolicy"), folder, False)
        assert not may_write(plain.policy("TrainerPolicy"), folder, True)
    notification = presigned.property("Bucket", "NotificationConfiguration")
    assert notification["QueueConfigurations"][0]["Queue"] == ARNS["Queue"]
    assert plain.property("Bucket", "NotificationConfiguration") is None
    _, allow = presigned.property("QueuePolicy", "PolicyDocument")["Statement"]
    assert (allow["Principal"], allow["Action"]) == ({"Service": "s3.amazonaws.com"}, "sqs:SendMessage")
    assert allow["Condition"]["StringEquals"] == {"aws:SourceAccount": "000000000000"}
    assert len(plain.property("QueuePolicy", "PolicyDocument")["Statement"]) == 1


def test_an_agent_can_announce_and_reaches_no_other_service() -> None:
    sqs = [statement for statement in AGENT if any(a.startswith("sqs:") for a in listed(statement["Action"]))]
    assert [resources(statement) for statement in sqs] == [[{"Fn::GetAtt": "Queue.Arn"}, RUN_QUEUES]]
    assert actions(sqs) == {"sqs:SendMessage"}
    services = {action.partition(":")[0] for action in actions(AGENT)}
    assert services == {"s3", "sqs", "ecr", "logs", "cloudwatch", "xray"}
    assert actions(AGENT) & {"ecr:PutImage", "logs:DeleteLogGroup", "logs:GetLogEvents"} == set()


def test_only_agentcore_in_this_account_can_take_the_agents_role() -> None:
    (trust,) = TEMPLATE["Resources"]["AgentRole"]["Properties"]["AssumeRolePolicyDocument"]["Statement"]
    assert trust["Principal"] == {"Service": "bedrock-agentcore.amazonaws.com"}
    assert trust["Condition"]["StringEquals"] == {"aws:SourceAccount": {"Ref": "AWS::AccountId"}}
    source = trust["Condition"]["ArnLike"]["aws:SourceArn"]["Fn::Sub"]
    assert source.endswith(":bedrock-agentcore:${AWS::Region}:${AWS::AccountId}:*")


def test_the_trainer_starts_and_stops_sessions_of_this_runtime_only() -> None:
    invokes = [s for s in TRAINER if "bedrock-agentcore:InvokeAgentRuntime" in listed(s["Action"])]
    assert {statement["Sid"] for statement in invokes} == {"Sessions", "RuntimesOfARun"}
    (sessions,) = [statement for statement in invokes if statement["Sid"] == "Sessions"]
    assert "bedrock-agentcore:StopRuntimeSession" in sessions["Action"]
    assert resources(sessions) == [
        {"Fn::Sub": f"{ACCOUNT}:runtime/rollout_${{AgentName}}-*"},
        {"Fn::GetAtt": "Runtime.AgentRuntimeArn"},
        {"Fn::Sub": "${Runtime.AgentRuntimeArn}/runtime-endpoint/*"},
    ]


def test_the_trainer_makes_runtimes_under_their_own_name_and_only_where_it_is_allowed_to():
    document = TEMPLATE["Resources"]["TrainerPolicy"]["Properties"]["PolicyDocument"]
    conditional = [
        one["Fn::If"][1]["Sid"] for one in document["Statement"] if one.get("Fn::If", [""])[0] == "HasRunRuntimes"
    ]
    by_sid = {statement["Sid"]: statement for statement in TRAINER}
    assert conditional == ["MakeRuntimes", "RuntimesOfARun", "GiveTheAgentItsRole", "RolesOfAgentCoreItself"]
    changes = {"bedrock-agentcore:UpdateAgentRuntime", "bedrock-agentcore:DeleteAgentRuntime"}
    for statement in TRAINER:
        if changes & set(listed(statement["Action"])):
            assert statement["Sid"] == "RuntimesOfARun"
    for resource in resources(by_sid["RuntimesOfARun"]):
        assert resource["Fn::Sub"].startswith(ACCOUNT)
        assert resource["Fn::Sub"].endswith(("/rollout_*", ":workload-identity-directory/default"))
    passing = by_sid["GiveTheAgentItsRole"]
    assert (passing["Action"], resources(passing)) == ("iam:PassRole", [{"Fn::GetAtt": "AgentRole.Arn"}])
    assert passing["Condition"] == {"StringEquals": {"iam:PassedToService": "bedrock-agentcore.amazonaws.com"}}
    assert {a for a in actions(TRAINER) if a.startswith("iam:")} == {"iam:PassRole", "iam:CreateServiceLinkedRole"}


def test_training_sessions_are_allowed_where_they_are_asked_for_and_as_the_check_lists_them(stack):
    role = "arn:aws:iam::000000000000:role/sessions"
    named = {"TrainerPolicy": "trainer", "TrainingSessionsPolicy": "sessions", "TrainingSessionRole": role}
    arns = {**ARNS, **named, "BuildRole": "arn:aws:none:::BuildRole"}
    with_sessions, without = (stack(arns, AgentName="agent", TrainingSessions=value) for value in ("true", "false"))
    caller = Identity("arn:aws:sts::000000000000:assumed-role/r/s", "000000000000", "env", True, True, None)
    account = "arn:aws:sagemaker:us-east-1:000000000000"
    sagemaker = {
        "role_arn": role,
        "model_package_group_arn": f"{account}:model-package-group/checkpoints",
        "output": "s3://bucket/checkpoints",
    }
    model = "arn:aws:sagemaker:us-east-1:aws:hub-content/SageMakerPublicHub/Model/tiny"
    service = {"kind": "sagemaker", "base_model": model, "sagemaker": sagemaker}
    needed = [
        each
        for each in needed_permissions(run_config(training_service=service), caller)
        if "TrainingSessionsPolicyArn" in each.policy
    ]
    policy = with_sessions.policy("TrainingSessionsPolicy")
    assert {each.action for each in needed} == actions(policy)
    for each in needed:
        for resource in each.resources:
            assert allowed(policy, Access(each.action, resource, dict(each.context)))
    for other in (f"{account}:training-session/another", f"{account}:training-job/rollout-run"):
        assert not allowed(policy, Access("sagemaker:StopTrainingSession", other))
    assert not allowed(policy, Access("iam:PassRole", role, {"iam:PassedToService": "ec2.amazonaws.com"}))
    for made, attached in ((with_sessions, True), (without, False)):
        assert ("sessions" in made.property("TrainerRole", "ManagedPolicyArns")) is attached
        deletes = Access("sagemaker:DeleteTrainingSession", f"{account}:training-session/rollout-run-1")
        assert allowed(made.policy("DeployerPolicy"), deletes) is attached
    for resource in ("TrainingSessionsPolicy", "TrainingSessionRole"):
        assert TEMPLATE["Resources"][resource]["Condition"] == "HasTrainingSessions"
    (trust,) = TEMPLATE["Resources"]["TrainingSessionRole"]["Properties"]["AssumeRolePolicyDocument"]["Statement"]
    assert trust["Principal"] == {"Service": "sagemaker.amazonaws.com"}
    assert trust["Condition"]["StringEquals"] == {"aws:SourceAccount": {"Ref": "AWS::AccountId"}}


@pytest.mark.parametrize("name", ["TrainerPolicy", "DeployerPolicy", "TrainingSessionsPolicy"])
def test_a_policy_with_everything_is_as_short_as_a_managed_policy_must_be(stack, name):
    arns = dict.fromkeys(TEMPLATE["Resources"], "arn:aws:none:us-east-1:000000000000:" + "x" * 60)
    options = {
        key: "true" for key, given in TEMPLATE["Parameters"].items() if "true" in given.get("AllowedValues", ())
    }
    made = stack(arns, **options, AgentName="a" * 48, ImageUri="x", NetworkStack="n" * 30)
    # IAM counts no white space.
    assert len("".join(json.dumps(made.policy(name)).split())) < 6144


def test_the_deployers_policy_is_exactly_what_the_commands_say_that_they_call():
    said = {action for call in (*DEPLOY, *DOWN) for action in call.actions}
    assert said == actions(DEPLOYER)


def test_codebuild_may_do_what_its_build_does_and_nothing_else():
    assert {action for call in BUILD for action in call.actions} == actions(BUILDER)
    (trust,) = TEMPLATE["Resources"]["BuildRole"]["Properties"]["AssumeRolePolicyDocument"]["Statement"]
    assert trust["Principal"] == {"Service": "codebuild.amazonaws.com"}
    assert trust["Condition"]["StringEquals"] == {"aws:SourceAccount": {"Ref": "AWS::AccountId"}}
    assert trust["Condition"]["ArnLike"]["aws:SourceArn"]["Fn::Sub"].endswith(":project/rollout_*")


def test_who_deploys_writes_no_results():
    writes = [statement for statement in DEPLOYER if "s3:PutObject" in listed(statement["Action"])]
    assert [resources(statement) for statement in writes] == [[{"Fn::Sub": "${Bucket.Arn}/${ResultPrefix}code/*"}]]


def test_the_trainer_touches_results_of_runs_only() -> None:
    by_sid = {statement["Sid"]: statement for statement in TRAINER}
    probes = by_sid.pop("RemoveWhatACheckWrote")
    assert resources(probes) == [{"Fn::Sub": "${Bucket.Arn}/${ResultPrefix}runs/preflight/*"}]
    assert "s3:DeleteObject" not in actions([*by_sid.values()])
    assert actions(TRAINER) & {"s3:PutBucketPolicy", "sqs:PurgeQueue"} == set()
    assert (by_sid["Results"]["Action"], resources(by_sid["Results"])) == ("s3:GetObject", [RUNS])
    writes = [
        statement
        for statement in TRAINER
        if "s3:PutObject" in listed(statement["Action"]) and statement["Sid"] not in OF_RESULTS
    ]
    names = ("quarantine/*", "manifests/*", "scores/*", "task-blocklist/*", "lease")
    beside = [{"Fn::Sub": f"${{Bucket.Arn}}/${{ResultPrefix}}runs/*/{name}"} for name in names]
    assert [one for write in writes for one in resources(write)] == beside
    assert resources(by_sid["FindResults"]) == [{"Fn::GetAtt": "Bucket.Arn"}]


def test_the_trainer_makes_and_deletes_queues_of_runs_only() -> None:
    for statement in TRAINER:
        if {"sqs:CreateQueue", "sqs:DeleteQueue", "sqs:SetQueueAttributes"} & set(listed(statement["Action"])):
            assert resources(statement) == [RUN_QUEUES]


@pytest.mark.parametrize("name", ["BucketPolicy", "QueuePolicy", "DeadLetterQueuePolicy"])
def test_nothing_is_reached_without_tls(name: str) -> None:
    statement, *_ = TEMPLATE["Resources"][name]["Properties"]["PolicyDocument"]["Statement"]
    assert (statement["Effect"], statement["Principal"]) == ("Deny", "*")
    assert statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}


def test_the_bucket_is_private_encrypted_kept_and_cleared() -> None:
    bucket = TEMPLATE["Resources"]["Bucket"]
    properties = bucket["Properties"]
    assert bucket["DeletionPolicy"] == bucket["UpdateReplacePolicy"] == "Retain"
    assert set(properties["PublicAccessBlockConfiguration"].values()) == {True}
    assert len(properties["PublicAccessBlockConfiguration"]) == 4
    assert "BucketEncryption" in properties
    (rule,) = properties["LifecycleConfiguration"]["Rules"]
    assert rule["Prefix"] == {"Fn::Sub": "${ResultPrefix}runs/"}
    assert rule["ExpirationInDays"] == {"Ref": "KeepResultsDays"}


def test_queues_are_encrypted_and_poison_goes_to_the_dead_letter_queue() -> None:
    queue = TEMPLATE["Resources"]["Queue"]["Properties"]
    dead = TEMPLATE["Resources"]["DeadLetterQueue"]["Properties"]
    assert queue["SqsManagedSseEnabled"] is dead["SqsManagedSseEnabled"] is True
    assert queue["RedrivePolicy"]["deadLetterTargetArn"] == {"Fn::GetAtt": "DeadLetterQueue.Arn"}
    assert dead["MessageRetentionPeriod"] >= queue["MessageRetentionPeriod"]


@pytest.mark.parametrize(
    ("parameter", "good", "bad"),
    [
        ("AgentName", ["a", "my_agent", "A" * 48], ["my-agent", "1agent", "", "A" * 49]),
        (
            "ImageUri",
            [
                "",
                "123456789012.dkr.ecr.us-east-1.amazonaws.com/my-agent-repository-1a2b:git-0123abc",
                f"123456789012.dkr.ecr.eu-west-1.amazonaws.com/x/y@sha256:{'0' * 64}",
            ],
            ["my-agent:1", "123456789012.dkr.ecr.us-east-1.amazonaws.com/x", "docker.io/library/python:3"],
        ),
        ("ResultPrefix", ["", "team/", "a/b.c/"], ["team", "/team/", "a b/"]),
    ],
)
def test_parameters_refuse_values_that_aws_would_refuse(parameter, good, bad):
    pattern = TEMPLATE["Parameters"][parameter]["AllowedPattern"]
    assert [value for value in good if not re.fullmatch(pattern, value)] == []
    assert [value for value in bad if re.fullmatch(pattern, value)] == []


def test_defaults_fit_the_settings_defaults() -> None:
    """A stack and a config that both leave the defaults must work together."""
    config = run_config()
    properties = TEMPLATE["Resources"]["Queue"]["Properties"]
    longest = config.timeouts.agent_s + config.timeouts.publish_grace_s
    assert TEMPLATE["Parameters"]["MaxLifetimeSeconds"]["Default"] > longest
    assert TEMPLATE["Parameters"]["ResultPrefix"]["Default"] == config.storage.prefix
    assert TEMPLATE["Parameters"]["RunQueues"]["Default"] == str(config.queue.url is None).lower()
    assert properties["VisibilityTimeout"] == config.queue.visibility_s
    assert properties["RedrivePolicy"]["maxReceiveCount"] > buffer._RECEIVES, "runs share the stack's queue"
