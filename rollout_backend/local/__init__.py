"""The embedded cloud of a laptop, and an engine with scripted answers."""
