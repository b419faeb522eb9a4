"""Test an agent runtime of your own: the tests that each runtime must pass, and a proxy that injects faults."""
