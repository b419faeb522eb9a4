"""Compute rewards on the training side, out of the agent's reach."""
