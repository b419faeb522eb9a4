"""No two texts of users share a name, wherever a name is derived from one."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout_backend.agents.runtimes.agentcore.images import LEASE, lease_of
from rollout_backend.agents.runtimes.kubernetes.manifests import job_name, label_value
from rollout_backend.base.names import derived_name
from rollout_backend.config import AgentCoreConfig, StorageConfig
from rollout_backend.run.collect.queue import queue_name
from rollout_backend.workbench.deploy.deployment import runtime_name

LONG = "qwen3_4b_grpo_swe_bs256_n8_lr1e-6_kl0.001_clip0.28_temp1.0_len32768_turns40_tool_bash_edit_reward_v2_"


def of_image(repository: str) -> str:
    image = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/{repository}:1"
    return AgentCoreConfig(image=image, role="arn:aws:iam::123456789012:role/agent").runtime_name


@dataclasses.dataclass(frozen=True)
class Kind:
    """Where a name is made: the texts that may be given, and the names that the service accepts."""

    name_of: Callable[[str], str]
    given: str
    accepted: str


KINDS = {
    "queue": Kind(
        lambda text: f"{queue_name(StorageConfig(bucket='rollouts'), text)}-dlq",
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}",
        r"[A-Za-z0-9_-]{1,80}",
    ),
    "lease": Kind(
        lease_of, r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", rf"(?=.{{1,128}}\Z){re.escape(LEASE)}[A-Za-z0-9._-]+"
    ),
    "runtime of an image": Kind(
        of_image,
        r"[a-z0-9]+([._-][a-z0-9]+){0,9}(/[a-z0-9]+([._-][a-z0-9]+){0,9}){0,2}",
        "[a-zA-Z][a-zA-Z0-9_]{0,47}",
    ),
    "runtime of a folder": Kind(
        lambda text: runtime_name(Path("/agents") / text), r"[^/\0]{1,80}", "[a-zA-Z][a-zA-Z0-9_]{0,47}"
    ),
    "Job": Kind(job_name, r".{1,256}", r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"),
    "label": Kind(label_value, r".{1,256}", r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"),
    "file": Kind(
        lambda text: derived_name(text, "A-Za-z0-9._-", 200), r".{1,256}", r"[A-Za-z0-9]([A-Za-z0-9._-]{0,199})?"
    ),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "pair", [("a-b", "a_b"), ("a.b", "a-b"), ("a--b", "a-b"), (f"{LONG}1"[-100:], f"{LONG}2"[-100:])]
)
def test_texts_that_people_write_get_different_names(kind, pair):
    given = [text for text in pair if re.fullmatch(kind.given, text)]
    names = [kind.name_of(text) for text in given]
    assert len(set(names)) == len(given)
    assert all(re.fullmatch(kind.accepted, name) for name in names)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_different_texts_never_share_a_name(kind):
    texts = st.from_regex(kind.given, fullmatch=True).filter(lambda text: text not in (".", ".."))

    @given(texts, texts)
    def distinct(one, other):
        names = [kind.name_of(text) for text in (one, other)]
        assert (names[0] == names[1]) == (one == other)
        assert all(re.fullmatch(kind.accepted, name) for name in names)
        again = [kind.name_of(text) for text in (one, other)]
        assert names == again

    distinct()


@given(st.text(), st.text(max_size=3))
@example("実験", "対照")
@example("", "-")
def test_a_name_that_looks_derived_is_no_text_of_its_own(text, other):
    """Otherwise a run that is called after the derived name of another would take its place."""
    for characters, limit in (("A-Za-z0-9._-", 128), ("a-z0-9-", 63)):
        name = derived_name(text, characters, limit)
        assert re.fullmatch(f"[A-Za-z0-9][{characters}]{{0,{limit - 1}}}", name)
        assert name == text or derived_name(name, characters, limit) != name
        assert (derived_name(other, characters, limit) == name) == (other == text)


def test_a_valid_text_is_its_name_and_others_stay_readable():
    assert derived_name("math-grpo.7", "A-Za-z0-9._-", 128) == "math-grpo.7"
    assert re.fullmatch("math-grpo-[0-9a-f]{10}", derived_name("math grpo!", "A-Za-z0-9._-", 128))
    assert re.fullmatch("rollout_my_agent_[0-9a-f]{10}", of_image("team/my-agent").replace("team_", ""))
    assert of_image("agent") == "rollout_agent"
