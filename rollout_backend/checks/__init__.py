"""Checks before a run: `rollout doctor` makes all of them, a run those of `preflight` before it spends anything.

Each line says what was found and what to do. `machine` and `model` check this machine, `account` and `public_address`
what only doctor asks.

Invariants:

- Every check runs, even if others fail, and none raises for what it finds.
- What is started here ends here; what is written to AWS is removed, if that is allowed.
"""
