"""A report as a tree, for tests without a browser."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

_VOID = {"meta", "br", "input", "link", "hr", "img"}


class Page(HTMLParser):
    """A report: the text of each element with an id, all tags, and the data of its script."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[tuple[str, str | None]] = []
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append((tag, named))
        if tag not in _VOID:
            self._open.append((tag, named.get("id")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        for _, name in self._open:
            if name is not None:
                self.texts.setdefault(name, []).append(data)

    def text(self, name: str) -> str:
        return " ".join(" ".join(self.texts[name]).split())

    @property
    def data(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads("".join(self.texts["data"]))
        return value
