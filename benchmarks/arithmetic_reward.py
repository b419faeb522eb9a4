"""Score replies to the questions of the arithmetic example. verl loads this file by its path."""

import re


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: object) -> float:
    """Return 1 if the last integer of the reply is the answer."""
    numbers = re.findall(r"-?\d+", solution_str)
    return float(bool(numbers) and int(numbers[-1]) == int(ground_truth))
