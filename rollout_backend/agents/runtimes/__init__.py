"""Agent runtimes. A runtime opens one container session per invoke, and stops it.

To add a runtime, subclass `base.AgentRuntime` in a module of this package, and `RuntimeConfig`, with the name of that
class, in `rollout_backend/config/runtimes.py`. Nothing else depends on the kind of runtime.
"""
