"""Clean up after a killed run.

A run that ends normally closes its sessions and deletes its queues. A killed run cannot, and under verl every run is
killed, because Ray ends its processes without their exit hooks. Each run therefore starts a janitor: a process in a
separate session that waits until the run reports that it is done, or dies. If the run dies:

1. The janitor waits for `janitor.grace_s`, and then for any manager that is restarting the run. If another manager
   holds the run by then (`runs/RUN/lease` in the bucket; see `run_lease`), the queues and sessions belong to that
   manager, and the janitor exits without changes.
2. Otherwise, it deletes the queues that the run created, except a dead-letter queue with messages, which it keeps as
   evidence. It records the run's sessions as closed and stops them.
3. If the bucket cannot be read, it changes nothing.

Invariant: it exits within a bounded time after the run.

A run that restarts after the grace time creates its queue again (SQS blocks a deleted name for a minute) and finds
published results in S3.

`janitor_process` starts the process and reports to it; `__main__` is the process.
"""
