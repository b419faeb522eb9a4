"""Test your own agent runtime: the tests that each runtime must pass, and a proxy that injects faults."""
