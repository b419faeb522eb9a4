"""Simulate a run deterministically: the production code in virtual time, with planned faults.

One seed is one history. `run` plays it, `chaos` plays many.

- The services: `s3`, `sqs`, `runtime`, `gateway` and `run_directory` each hold the state that all trainers share, and
  the client (`SimStore`, ...) that one trainer uses. `agents` run in the sessions, and `agent_sources` has what
  agents of other protocols leave there. `world` connects them all.
- The trainer: `trainer_process` runs the production code, with the settings and tasks that `scenario` draws.
- The faults: `faults` has the probability of each, `capacity` the runtime's limits.
- The invariants: `checks` has what must hold under every fault. `session_audit` and `run_holder` observe the services
  and record violations in `evidence`.
- `mutants` are variants of the production code that are broken on purpose, and that the checks must catch.
"""
