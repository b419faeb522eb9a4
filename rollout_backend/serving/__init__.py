"""Start, watch and restart what the training side serves: engines, router, gateways and the relay's dialer.

To add a kind of engine, see `registry`. `supervisor` restarts servers that exit. `run_secret` makes the run's secret.
"""
