"""Show runs in a terminal: while they run, at their end, and from their directories."""
