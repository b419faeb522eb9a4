"""The result of one check before a run starts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from rollout_backend.errors import PreflightError, RolloutBackendError

Level = Literal["ok", "warning", "problem", "unchecked"]


@dataclass(frozen=True)
class CheckResult:
    """The result of a check. A `problem` stops the run; `unchecked` means that the check cannot run here. `setting`
    is the setting to change, and `text` describes the finding and the remedy."""

    level: Level
    setting: str
    text: str
    name: str = ""
    """Name of the check, which is stable across versions. Defaults to `setting`."""
    cause: str = ""
    """A cause that makes other checks fail as well, such as a missing login; empty if there is none."""

    @classmethod
    def of_error(cls, setting: str, error: RolloutBackendError) -> Self:
        """Return the problem that an error describes."""
        return cls("problem", setting, str(error), cause=error.cause if isinstance(error, PreflightError) else "")

    def __str__(self) -> str:
        return self.text if self.text.startswith(self.setting) else f"{self.setting}: {self.text}"

    def fields(self) -> dict[str, str]:
        """Return the result as JSON values."""
        return {"id": self.name or self.setting, "level": self.level, "setting": self.setting, "text": self.text}


def group_by_cause(findings: Iterable[CheckResult]) -> Sequence[CheckResult]:
    """Merge findings with the same cause into one, which lists the settings that could not be checked."""
    grouped: dict[object, list[CheckResult]] = {}
    for number, each in enumerate(sorted(findings, key=lambda each: each.level != "problem")):
        grouped.setdefault(each.cause or number, []).append(each)
    found = []
    for first, *others in grouped.values():
        names = dict.fromkeys(each.setting for each in others if each.setting != first.setting)
        text = f"{first.text}. These could not be checked either: {', '.join(names)}" if names else first.text
        found.append(replace(first, text=text))
    return found


def raise_problems(findings: Iterable[CheckResult]) -> None:
    """Raise PreflightError with every problem, if there is one."""
    problems = [str(finding) for finding in group_by_cause(findings) if finding.level == "problem"]
    if len(problems) == 1:
        raise PreflightError(problems[0])
    if problems:
        raise PreflightError(f"{len(problems)} problems were found:\n" + "\n".join(f"- {each}" for each in problems))
