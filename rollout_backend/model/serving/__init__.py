"""Start, watch and restart the training side's servers: engines, router, gateways and the relay's dialer.

To add a kind of engine, implement `engine.EngineFactory` in a module of this package, and list it in `ENGINE_KINDS`
of `rollout_backend/config/serving.py`. A factory in your own package needs no entry.

`supervisor` restarts servers that exit. `run_secret` creates the run's secret and the session keys. `cpu_engine` has
the code that runs in the interpreter of a CPU engine.
"""
