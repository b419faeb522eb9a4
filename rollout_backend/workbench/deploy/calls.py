"""List the AWS calls of `rollout deploy` and `rollout down`, each with the IAM actions that allow it.

A test compares the table with a recorded run, with the policies in `infra/template.yaml`, and with docs/deploy.md.
"""

from __future__ import annotations

from typing import NamedTuple

CODE, CODEBUILD, LOCAL_IMAGE = ("code",), ("codebuild",), ("docker", "podman")


class Call(NamedTuple):
    """An AWS call. `only` names the values of `--build` that make the call; empty if every deployment makes it."""

    name: str
    actions: tuple[str, ...]
    why: str
    only: tuple[str, ...] = ()
    pins: bool = False
    """Whether only a deployment with `runtime.qualifier` makes the call."""
    sessions: bool = False
    """Whether only a run that trains in SageMaker's sessions makes the call."""


_AC = "bedrock-agentcore"
_PUSH = (
    "ecr:BatchCheckLayerAvailability",
    "ecr:BatchGetImage",
    "ecr:CompleteLayerUpload",
    "ecr:InitiateLayerUpload",
    "ecr:PutImage",
    "ecr:UploadLayerPart",
)

DEPLOY = (
    Call("DescribeStacks", ("cloudformation:DescribeStacks",), "reads the outputs of the stack"),
    Call("PutObject", ("s3:PutObject",), "uploads the code or the image's source, once", CODE + CODEBUILD),
    Call("GetAuthorizationToken", ("ecr:GetAuthorizationToken",), "logs in to the registry", LOCAL_IMAGE),
    Call("docker push", _PUSH, "pushes the image", LOCAL_IMAGE),
    Call("BatchGetProjects", ("codebuild:BatchGetProjects",), "finds the project", CODEBUILD),
    Call("CreateProject", ("codebuild:CreateProject", "iam:PassRole"), "creates the project", CODEBUILD),
    Call("UpdateProject", ("codebuild:UpdateProject", "iam:PassRole"), "changes it, if it differs", CODEBUILD),
    Call("StartBuild", ("codebuild:StartBuild",), "builds the image and pushes it", CODEBUILD),
    Call("BatchGetBuilds", ("codebuild:BatchGetBuilds",), "waits for the end of the build", CODEBUILD),
    Call("StopBuild", ("codebuild:StopBuild",), "stops it, if it takes too long or you interrupt", CODEBUILD),
    Call("GetLogEvents", ("logs:GetLogEvents",), "reads the end of the log, if it fails", CODEBUILD),
    Call(
        "BatchGetImage",
        ("ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"),
        "checks that the image is built for arm64",
        CODEBUILD + LOCAL_IMAGE,
    ),
    Call("ListAgentRuntimes", (f"{_AC}:ListAgentRuntimes",), "finds the runtime by its name"),
    Call(
        "CreateAgentRuntime",
        (
            f"{_AC}:CreateAgentRuntime",
            f"{_AC}:CreateAgentRuntimeEndpoint",
            f"{_AC}:CreateWorkloadIdentity",
            f"{_AC}:TagResource",
            "iam:CreateServiceLinkedRole",
            "iam:PassRole",
            "s3:GetObject",
        ),
        "creates the runtime, its endpoint and its identity; AgentCore reads the code",
    ),
    Call("UpdateAgentRuntime", (f"{_AC}:UpdateAgentRuntime",), "changes it, and requires MMDSv2"),
    Call("GetAgentRuntime", (f"{_AC}:GetAgentRuntime",), "waits until it is ready"),
    Call("GetAgentRuntimeEndpoint", (f"{_AC}:GetAgentRuntimeEndpoint",), "waits until its endpoint serves it"),
    Call(
        "CreateAgentRuntimeEndpoint",
        (f"{_AC}:CreateAgentRuntimeEndpoint",),
        "creates the endpoint of runtime.qualifier",
        pins=True,
    ),
    Call("UpdateAgentRuntimeEndpoint", (f"{_AC}:UpdateAgentRuntimeEndpoint",), "pins it to the version", pins=True),
    Call("InvokeAgentRuntime", (f"{_AC}:InvokeAgentRuntime",), "starts the smoke rollout"),
    Call("GetObject", ("s3:GetObject",), "reads the smoke rollout's result"),
    Call("StopRuntimeSession", (f"{_AC}:StopRuntimeSession",), "stops its session"),
)
ADOPT = (
    Call("GetAgentRuntime", (f"{_AC}:GetAgentRuntime",), "reads what it has, and waits until it is ready"),
    Call(
        "UpdateAgentRuntime",
        (f"{_AC}:UpdateAgentRuntime", "iam:PassRole"),
        "requires MMDSv2, with `--yes`, and keeps the rest",
    ),
    Call("GetAgentRuntimeEndpoint", (f"{_AC}:GetAgentRuntimeEndpoint",), "waits until its endpoint serves it"),
    Call("ListAgentRuntimeEndpoints", (f"{_AC}:ListAgentRuntimeEndpoints",), "names endpoints of older versions"),
)
DOWN = (
    Call("DescribeStacks", ("cloudformation:DescribeStacks",), "reads the outputs of the stack"),
    Call("ListAgentRuntimes", (f"{_AC}:ListAgentRuntimes",), "finds the runtimes"),
    Call("GetAgentRuntime", (f"{_AC}:GetAgentRuntime",), "reads their role, and waits until they are deleted"),
    Call("ListTagsForResource", (f"{_AC}:ListTagsForResource",), "reads whether this backend made them"),
    Call("ListAgentRuntimeEndpoints", (f"{_AC}:ListAgentRuntimeEndpoints",), "finds pinned endpoints"),
    Call("DeleteAgentRuntimeEndpoint", (f"{_AC}:DeleteAgentRuntimeEndpoint",), "deletes them"),
    Call(
        "DeleteAgentRuntime",
        (f"{_AC}:DeleteAgentRuntime", f"{_AC}:DeleteWorkloadIdentity"),
        "deletes a runtime with its endpoint and identity",
    ),
    Call("BatchGetProjects", ("codebuild:BatchGetProjects",), "finds the project of `--build codebuild`"),
    Call("DeleteProject", ("codebuild:DeleteProject",), "deletes it"),
    Call("ListObjectsV2", ("s3:ListBucket",), "finds the runs, the code and the results"),
    Call("ListQueues", ("sqs:ListQueues",), "finds the queues of runs"),
    Call("DeleteQueue", ("sqs:DeleteQueue",), "deletes them"),
    Call(
        "ListTrainingSessions",
        ("sagemaker:ListTrainingSessions",),
        "finds the training sessions of runs",
        sessions=True,
    ),
    Call("DescribeTrainingSession", ("sagemaker:DescribeTrainingSession",), "waits for their end", sessions=True),
    Call("StopTrainingSession", ("sagemaker:StopTrainingSession",), "stops them", sessions=True),
    Call("DeleteTrainingSession", ("sagemaker:DeleteTrainingSession",), "deletes them", sessions=True),
    Call("DeleteObjects", ("s3:DeleteObject",), "deletes the code, and the results with --delete-results"),
)


BUILD = (
    Call("GetObject", ("s3:GetObject",), "reads the source"),
    Call("GetAuthorizationToken", ("ecr:GetAuthorizationToken",), "logs in to the registry"),
    Call("docker push", _PUSH, "pushes the image"),
    Call("PutLogEvents", ("logs:CreateLogGroup", "logs:CreateLogStream", "logs:PutLogEvents"), "writes its log"),
)
"""Calls that CodeBuild makes under the stack's build role."""


def calls_of_deployment(build: str, *, pinned: bool) -> tuple[Call, ...]:
    """Return the calls of a deployment with this `--build`, and with `runtime.qualifier` if `pinned`."""
    return tuple(call for call in DEPLOY if (not call.only or build in call.only) and (pinned or not call.pins))
