"""The step numbers of a trainer's batches. Pure.

A number follows from the trainer's global step, whether the batch validates, and its position among the batches of
that kind in the global step: training refills lost groups, and asynchronous trainers take many batches.
"""

from __future__ import annotations

POSITIONS = 500  # batches of one kind in a global step


def batch_number(global_step: int, validate: bool, position: int) -> int:
    """Return the step number of a batch."""
    return (global_step * 2 + validate) * POSITIONS + position % POSITIONS


def global_step_of(number: int) -> int:
    """Return the trainer's global step of a batch by its step number."""
    return number // (2 * POSITIONS)


def validates(number: int) -> bool:
    """Return whether the batch with this step number validates."""
    return number // POSITIONS % 2 == 1


def describe_batch(number: int) -> tuple[str, bool]:
    """Return the name of a batch by its step number, and whether it validates."""
    kind, position = divmod(number, POSITIONS)
    global_step, validate = divmod(kind, 2)
    return f"{global_step}{' validation' if validate else ''}{f'.{position}' if position else ''}", bool(validate)
