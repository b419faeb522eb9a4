"""The order that a verifier's container gets from the training side, and the files that come with it."""

from pydantic import Field

from agent_wrapper.contract.objects import Artifact, ContractObject

ORDER, TESTS = "verifier.json", "tests.tar.gz"
"""Names of the files in the folder."""


class VerifierOrder(ContractObject):
    """What to score, and how."""

    artifacts_url: str = Field(repr=False)  # GET returns the object that `artifacts_key` names
    artifacts: tuple[Artifact, ...]  # that the agent's result lists
    timeout_s: float = Field(gt=0)  # of the tests
    env: dict[str, str] = Field(default={}, repr=False)  # variables of the tests
