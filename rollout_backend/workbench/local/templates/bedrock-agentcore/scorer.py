"""Score what the agent returned. The scorer runs on the training side. docs/rewards.md lists what it gets."""

import re


def score(given) -> float:
    """Return 1 if the last integer of the agent's result is the answer, else 0."""
    numbers = re.findall(r"-?\d+", str(given.extras["result"]))
    return float(numbers[-1:] == [given.payload["answer"]])
