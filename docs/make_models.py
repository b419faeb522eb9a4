"""Write the table of families in docs/models.md, from the cases that the tests run: `python docs/make_models.py`.

`page()` returns the page as text. A test compares it with the file, so the two cannot differ.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("models.md")
sys.path.append(str(PAGE.parents[1] / "tests" / "support"))

from family_matrix import table  # noqa: E402


def page() -> str:
    begin, end = "<!-- family cases -->\n", "\n<!-- end of family cases -->"
    lines = "\n".join(["", *table(), ""])
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}{lines}{end}", PAGE.read_text(), flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
