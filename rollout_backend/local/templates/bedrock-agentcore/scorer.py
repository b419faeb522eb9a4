"""Score what the agent returned. It runs on the training side, so it is not needed in the agent's image."""

import re

from rollout_backend.scoring import ScoreInput


def score(given: ScoreInput) -> float:
    """Return 1 if the last integer of the result is the answer, else 0."""
    numbers = re.findall(r"-?\d+", str(given.rollout.extras.get("result", "")))
    return float(numbers[-1:] == [given.payload["answer"]])
