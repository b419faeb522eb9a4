"""Write the figures of a result into the table of docs/file-formats.md: `python docs/make_columns.py`.

`page()` returns the page as text. A test compares it with the file, so the two cannot differ.
"""

from __future__ import annotations

from pathlib import Path

from rollout_backend.run.accounts.records import ResultSummary
from rollout_backend.views.export import SCHEMAS

PAGE = Path(__file__).with_name("file-formats.md")


def page() -> str:
    types = SCHEMAS["rollouts"]
    rows = (
        f"| `{name}` | {types.field(name).type}? | {field.description} |\n"
        for name, field in ResultSummary.model_fields.items()
    )
    before, first, rest = PAGE.read_text().partition("| `reward` |")
    assert first, "the table has no column `reward`"
    return before + "".join(rows) + rest[rest.index("| `stored` |") :]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
