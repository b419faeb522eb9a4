"""Define the order that the training side sends to a verifier's container, and the files that come with it."""

from pydantic import Field

from agent_wrapper.contract.objects import Artifact, ContractObject

ORDER, TESTS = "verifier.json", "tests.tar.gz"
"""Names of the files in the verifier's folder."""


class VerifierOrder(ContractObject):
    """What to score, and how."""

    artifacts_url: str = Field(repr=False)  # GET returns the object that `artifacts_key` names
    artifacts: tuple[Artifact, ...]  # that the agent's result lists
    timeout_s: float = Field(gt=0)  # time limit of the tests
    env: dict[str, str] = Field(default={}, repr=False)  # environment variables of the tests
