"""Pure types and rules of a run, without I/O or clock: tasks, ledger, policies, manifests, reports, keys."""
