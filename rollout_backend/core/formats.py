"""Numbers as people read them, in terminals, reports and messages."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if need be."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
