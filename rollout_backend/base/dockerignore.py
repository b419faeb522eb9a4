"""Match files with the patterns of `.dockerignore` by the rules of Docker, whose matcher (moby/patternmatcher) this
module follows."""

import posixpath
import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from rollout_backend.errors import ConfigError


class FilePatterns:
    """The files that the lines of `.dockerignore` files name. The last line that matches a file or one of its folders
    decides."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Raise ConfigError for a pattern that Docker refuses as well."""
        self._patterns: list[tuple[bool, re.Pattern[str]]] = []
        for line in lines:
            pattern = line.strip()
            if not pattern or line.startswith("#"):
                continue
            included = pattern.startswith("!")
            cleaned = posixpath.normpath(pattern.removeprefix("!").strip() or "!")
            try:
                if cleaned == "!":
                    raise re.error("a file must follow")
                compiled = re.compile(_expression(cleaned.lstrip("/") or cleaned), re.DOTALL)
            except re.error as error:
                raise ConfigError(f".dockerignore has the invalid pattern {pattern!r}: {error}") from None
            self._patterns.append((included, compiled))

    def __contains__(self, name: PurePosixPath) -> bool:
        parts = [part.as_posix() for part in (name, *name.parents[:-1])]
        ignored = False
        for included, pattern in self._patterns:
            if included == ignored and any(map(pattern.fullmatch, parts)):
                ignored = not included
        return ignored


def _expression(pattern: str) -> str:
    """Return the regular expression of a pattern, in which `**` matches any number of folders."""
    if (rest := pattern.removeprefix("**")) != pattern and not re.search(r"^/|[*?\[\]\\]", rest):
        # Docker compares only the end.
        return f".*{re.escape(rest)}"
    found, at, in_class = "", 0, False
    while at < len(pattern):
        char, at = pattern[at], at + 1
        if in_class:
            in_class = char != "]"
            found += char
        elif char == "*" and pattern[at : at + 1] == "*":
            at += 2 if pattern[at + 1 : at + 2] == "/" else 1
            found += "(.*/)?" if at < len(pattern) else ".*"
        elif char == "*":
            found += "[^/]*"
        elif char == "?":
            found += "[^/]"
        elif char == "[":
            in_class = True
            found += char
        elif char == "\\" and at < len(pattern):
            found, at = found + re.escape(pattern[at]), at + 1
        else:
            found += re.escape(char)
    return found
