"""`rollout dev`: what is refused before anything starts. `tests/local/test_dev.py` runs agents."""

import pytest

from builders import refused


@pytest.fixture
def agent(repository):
    return repository / "examples" / "arithmetic" / "agent.py"


def test_input_that_cannot_be_used_is_refused(rollout, agent, tmp_path):
    cases = (
        ((tmp_path / "none.py",), "there is no agent at"),
        ((agent, "--task", "none"), "tasks.jsonl has no task 'none'; its first one is 'sum-6-5'"),
        ((agent, "--task", "sum-6-5", "--limit", "2"), "leave out --task or --limit"),
        ((agent, "--engine", "--endpoint", "http://127.0.0.1:9"), "leave out --engine or --endpoint"),
        ((agent, "--endpoint", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9/model_info"),
        ((agent, "-o", "model.path=/none"), "/none is not a folder on this machine"),
    )
    for arguments, words in cases:
        refused(rollout("dev", *arguments), words)
