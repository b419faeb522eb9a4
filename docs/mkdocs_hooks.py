"""Extend the documentation's site by what is outside docs/: the functions that mkdocs calls while it builds.

The site has README.md as its first page, each page and file that a link leads to, and the glossary. Links are written
for readers of the repository, and are rewritten here for the site. In the API reference, mkdocstrings renders each
class and function.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"`[^`\n]*`")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and files outside docs/."""
    glossary = (ROOT / "ARCHITECTURE.md").read_text().partition("## Glossary")[2]
    files.append(File.generated(config, "glossary.md", content=f"# Glossary{glossary}"))
    license_text = (ROOT / "LICENSE").read_text()
    files.append(File.generated(config, "LICENSE.md", content=f"# License\n\n```text\n{license_text}```\n"))
    pages = [ROOT / "README.md", ROOT / "infra" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:  # which grows
        for target in [page, *_targets(page)]:
            if files.get_file_from_path(_site_path(target)) is None:
                files.append(File.generated(config, _site_path(target), abs_src_path=str(target)))
                if target.suffix == ".md":
                    pages.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = page.file.abs_src_path and Path(page.file.abs_src_path)
    if page.file.src_uri == "api.md":
        markdown = _with_mkdocstrings(markdown)
    if source:
        here = os.path.dirname(page.file.src_uri)
        markdown = _LINK.sub(
            lambda link: f"]({os.path.relpath(_site_path(_target(source, link[1])), here)}{link[2] or ''})", markdown
        )
    # GitHub needs the backslash before a pipe in a table's code, and Markdown prints it.
    return _CODE.sub(lambda code: code[0].replace(r"\|", "|"), markdown)


def _targets(page: Path) -> Iterator[Path]:
    return (_target(page, link[1]) for link in _LINK.finditer(page.read_text()))


def _target(page: Path, link: str) -> Path:
    """Return the file that a page's link leads to: of a folder, its README."""
    path = (page.parent / link).resolve()
    return path / "README.md" if path.is_dir() else path


def _site_path(path: Path) -> str:
    """Return where the site has a file of the repository."""
    name = path.relative_to(ROOT).as_posix()
    return {"README.md": "index.md", "LICENSE": "LICENSE.md"}.get(name, name.removeprefix("docs/"))


def _with_mkdocstrings(reference: str) -> str:
    """Let mkdocstrings render each public class and function.

    The tables of fields stay, because only they have the comments of the fields.
    """
    package = ""
    parts = []
    for part in re.split(r"^(?=##)", reference, flags=re.M):
        if part.startswith("## "):
            package = part[3:].strip()
        name = part.removeprefix("### ").partition("\n")[0]
        if part.startswith("### ") and name.isidentifier() and name != "RolloutConfig":
            table = "".join(re.findall(r"^\|.*\n", part, flags=re.M))
            part = f"### {name}\n\n::: {package}.{name}\n\n{table}\n"
        parts.append(part)
    return "".join(parts)
