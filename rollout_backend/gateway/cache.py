"""Whether an engine's prefix cache still held a conversation when its next call came. Pure.

A session stays on one engine, which has its conversation cached. A call that goes on with the conversation and finds
far less of it there was sent to another engine, or the cache was emptied: evicted for want of room, or flushed with
new weights. The engine does not say which; it says how much it found.
"""

from __future__ import annotations

_MIN_TOKENS = 256  # an engine caches whole pages, and does not keep the last one
_SHARE = 0.5


def is_cache_break(known: int, cached: int) -> bool:
    """`known` tokens of the prompt are the conversation so far; the engine found `cached` of the prompt's tokens."""
    return known >= _MIN_TOKENS and cached < known * _SHARE
