import math

import pytest

from agent_wrapper import RolloutContext
from agent_wrapper.context import ArtifactError, Artifacts
from agent_wrapper.contract import (
    MAX_ARTIFACT_BYTES,
    MAX_ARTIFACTS,
    Artifact,
    ContractError,
    Rollout,
    unpack_artifacts,
)
from agent_wrapper.contract.keys import trace_ids
from protocol_requests import make_request
from rollouts import make_rollout


def test_in_deployment_the_environment_decides():
    env = {"OPENAI_BASE_URL": "http://model/v1", "OPENAI_API_KEY": "secret", "ROLLOUT_MODEL": "m"}
    context = RolloutContext.from_environment({"x": 1}, env)
    assert (context.base_url, context.api_key, context.model) == ("http://model/v1", "secret", "m")
    assert (context.training, context.rollout_id, context.remaining_s) == (False, None, math.inf)
    assert "secret" not in repr(context)


def test_in_training_the_context_names_the_rollouts_trace():
    context = RolloutContext.from_request(make_request(), {})
    ids = trace_ids("r", 3, "t.0")
    assert context.traceparent == context.environ()["TRACEPARENT"] == "00-{:032x}-{:016x}-01".format(*ids)
    assert RolloutContext.from_environment({}, {}).traceparent is None


def test_a_call_may_last_until_the_deadline():
    context = RolloutContext.from_request(make_request(remaining_s=1000), {})
    assert 700 < context.openai_kwargs()["timeout"] <= 1000
    late = RolloutContext.from_request(make_request(remaining_s=0), {})
    assert late.remaining_s == 0
    assert late.openai_kwargs()["timeout"] == 1


def test_bytes_texts_and_files_are_copied_when_they_are_added(tmp_path):
    artifacts = Artifacts()
    assert not artifacts
    file = tmp_path / "log.txt"
    file.write_text("first")
    artifacts.add("a", b"\x00")
    artifacts.add("b.txt", "\u00e9")
    artifacts.add("c", file)
    file.write_text("later")
    files = {"a": b"\x00", "b.txt": b"\xc3\xa9", "c": b"first"}
    assert artifacts
    packed, listed = artifacts.pack()
    assert unpack_artifacts(packed, listed) == files
    rollout = make_rollout("t.0").model_copy(update={"artifacts": listed})
    assert Rollout.decode(rollout.encode()).artifacts == listed


@pytest.mark.parametrize("name", ["../x", ".hidden", "a" * 129])
def test_an_invalid_name_is_refused(name):
    with pytest.raises(ArtifactError, match="cannot be an artifact's name: use up to 128 letters"):
        Artifacts().add(name, b"")


def test_count_and_size_are_bounded(tmp_path):
    artifacts, limit = Artifacts(), MAX_ARTIFACT_BYTES
    artifacts.add("a", bytes(limit - 2))
    with pytest.raises(ArtifactError, match="'a' was added before"):
        artifacts.add("a", b"")
    with pytest.raises(ArtifactError, match=f"with 'b' the artifacts have {limit + 1} bytes, more than {limit}"):
        artifacts.add("b", b"123")
    file = tmp_path / "large"
    file.write_bytes(bytes(limit + 1))
    for content in (file, file.read_bytes()):
        with pytest.raises(ArtifactError, match=f"has {limit + 1} bytes, more than the {limit} of all artifacts"):
            artifacts.add("b", content)
    artifacts.add("b", b"12")
    for number in range(2, MAX_ARTIFACTS):
        artifacts.add(f"empty-{number}", b"")
    with pytest.raises(ArtifactError, match=f"has {MAX_ARTIFACTS} artifacts at most"):
        artifacts.add("c", b"")


def test_only_what_the_result_lists_is_read():
    artifacts = Artifacts()
    artifacts.add("a", b"1")
    packed, listed = artifacts.pack()
    for wrong in ([], [Artifact.of("a", b"2")], [*listed, Artifact.of("b", b"")]):
        with pytest.raises(ContractError, match="are not those that the result lists"):
            unpack_artifacts(packed, wrong)
    with pytest.raises(ContractError):
        unpack_artifacts(b"no object", listed)
