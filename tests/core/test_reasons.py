import re
from pathlib import Path

from rollout_backend.core.reasons import what_to_do


def test_reports_and_the_documentation_say_the_same(repository: Path):
    page = (repository / "docs" / "run-rollouts.md").read_text().partition("## What each failure means")[2]
    rows = re.findall(r"^\| [a-z_, ]+ \| (`[^|]*`) \| [^|]* \| ([^|]*) \|$", page, flags=re.M)
    assert len(rows) > 30
    for names, text in rows:
        for reason in re.findall(r"`([a-z_]+)`", names):
            assert what_to_do(reason) == re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text), reason
