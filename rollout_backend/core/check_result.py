"""The result of one check before a run starts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rollout_backend.errors import PreflightError

Level = Literal["ok", "warning", "problem", "unchecked"]


@dataclass(frozen=True)
class CheckResult:
    """The result of a check. A `problem` stops the run; `unchecked` means that it could not be checked from here.
    `setting` is the setting to change, and `text` says what was found and what to do."""

    level: Level
    setting: str
    text: str
    name: str = ""
    """What was checked, by a name that is stable across versions. If empty, the name is `setting`."""

    def __str__(self) -> str:
        return self.text if self.text.startswith(self.setting) else f"{self.setting}: {self.text}"

    def fields(self) -> dict[str, str]:
        """Return the result as JSON values."""
        return {"id": self.name or self.setting, "level": self.level, "setting": self.setting, "text": self.text}


def raise_problems(findings: Iterable[CheckResult]) -> None:
    """Raise PreflightError with every problem, if there is one."""
    problems = [str(finding) for finding in findings if finding.level == "problem"]
    if len(problems) == 1:
        raise PreflightError(problems[0])
    if problems:
        raise PreflightError(f"{len(problems)} problems were found:\n" + "\n".join(f"- {each}" for each in problems))
