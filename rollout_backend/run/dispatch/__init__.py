"""Turn planned rollouts into running sessions, and close sessions, at the rate that the runtime grants."""
