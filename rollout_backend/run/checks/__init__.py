"""Checks before a run: `rollout doctor` runs all of them, a run only those of `preflight`.

Each line says what was found and what to do. A run checks before it spends anything. `machine` and `model` check this
machine; only doctor runs `account` and `public_address`.

Invariants:

- Every check runs, even if others fail, and no finding raises an error.
- The checks end what they start, and remove what they write to AWS, if that is allowed.
"""
