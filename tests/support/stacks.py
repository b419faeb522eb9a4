"""Answers of CloudFormation about stacks."""

from collections.abc import Mapping


def described_stack(
    outputs: Mapping[str, str], parameters: Mapping[str, str], status: str = "CREATE_COMPLETE"
) -> str:
    """Return the answer to DescribeStacks."""

    def members(kind: str, values: Mapping[str, str]) -> str:
        found = (
            f"<member><{kind}Key>{name}</{kind}Key><{kind}Value>{value}</{kind}Value></member>"
            for name, value in values.items()
        )
        return f"<{kind}s>{''.join(found)}</{kind}s>"

    return (
        "<DescribeStacksResponse><DescribeStacksResult><Stacks><member><StackName>my-agent</StackName>"
        f"<StackStatus>{status}</StackStatus><CreationTime>2026-11-01T00:00:00Z</CreationTime>"
        f"{members('Output', outputs)}{members('Parameter', parameters)}"
        "</member></Stacks></DescribeStacksResult></DescribeStacksResponse>"
    )
