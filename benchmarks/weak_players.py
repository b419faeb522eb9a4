"""Players that make legal moves and few good ones. Each answers by the text of its prompt alone. Pure."""

from __future__ import annotations

import random
import re

from rollout_backend.local.scripted import ToolCall

_CELLS = re.compile(r"([wasd])([.HG#])")


def weak_lake(prompt: str) -> str:
    """Move at random, but four times in ten to a free cell below or on the right, if there is one."""
    draw, cells = random.Random(prompt), dict(_CELLS.findall(prompt)[-4:])
    moves = list(cells)
    if draw.random() < 0.4:
        moves = [move for move in "sd" if cells[move] in ".G"] or moves
    return f"[{draw.choice(moves)}]"


def weak_sums(prompt: str) -> str:
    """Guess three times in ten; otherwise call the tool with any operator."""
    if "<tool_response>" in prompt:
        return "done"
    draw = random.Random(prompt)
    if draw.random() < 0.3:
        return str(draw.randint(0, 20))
    return str(ToolCall("apply", {"operator": draw.choice("+-*")}))
