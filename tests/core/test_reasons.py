import re
from pathlib import Path

from rollout_backend.core.reasons import WHAT_TO_DO, documented_at


def test_the_documentation_has_a_section_for_each_reason(repository: Path):
    page = (repository / "docs" / "troubleshooting.md").read_text()
    assert sorted(re.findall(r"^### `([a-z_]+)`$", page, flags=re.M)) == sorted(WHAT_TO_DO)
    assert documented_at("no_result") == "docs/troubleshooting.md#no_result"
    assert documented_at("of_another_wrapper") == "docs/troubleshooting.md#why-rollouts-fail"
