"""From a planned rollout to a running session, and from a session to none."""
