"""Agent runtimes: a runtime opens one container session per invoke and stops it.

To add a runtime, write a class that implements `base.AgentRuntime` in a module here, and a `RuntimeConfig` subclass
that names it in `rollout_backend/config/runtimes.py`. Nothing else depends on the kind of a runtime.
"""
