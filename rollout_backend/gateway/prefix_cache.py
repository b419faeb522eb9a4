"""Detect calls whose conversation was no longer in the engine's prefix cache. Pure.

A session stays on one engine, which caches its conversation. If a call that continues the conversation hits far less
than that, the call reached another engine, or the cache was evicted or flushed with new weights. The engine reports
only how much it found.
"""

from __future__ import annotations

_MIN_TOKENS = 256  # engines cache whole pages, and not the last one
_SHARE = 0.5


def is_cache_break(known: int, cached: int) -> bool:
    """Return whether the engine lost the conversation: its `known` tokens, of which the cache held `cached`."""
    return known >= _MIN_TOKENS and cached < known * _SHARE
