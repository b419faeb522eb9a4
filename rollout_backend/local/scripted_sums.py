"""A script for `ScriptedEngine` that answers sums, some of them wrong, so that rewards differ within a group."""

import itertools
import re

_SUM = re.compile(r"What is (\d+) \+ (\d+)\?")


class ScriptedSums:
    """Answers a prompt's last sum: wrong each third time that a prompt comes, by a phase that depends on the sum.

    Sums whose first number is 5 are always right. A prompt without a sum gets a fixed reply.
    """

    def __init__(self) -> None:
        self._counts: dict[str, itertools.count[int]] = {}

    def __call__(self, prompt: str) -> str:
        sums = _SUM.findall(prompt)
        if not sums:
            return "This reply is scripted."
        a, b = map(int, sums[-1])
        seen = next(self._counts.setdefault(prompt, itertools.count()))
        is_right = a == 5 or (a + b + seen) % 3 > 0
        return f"It is {a + b if is_right else a + b + 1}."
