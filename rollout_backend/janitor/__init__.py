"""Cleanup after a killed run.

A run that ends normally closes its sessions and deletes its queues. A killed run cannot, and under verl every run is
killed, because Ray ends its processes without their exit hooks. So each run starts a janitor: a process in its own
session that waits until the run reports that it is done, or dies. After a death:

1. The janitor waits `janitor.grace_s`, and then for a manager that is starting the run again. If another manager
   holds the run by then (`runs/RUN/lease` in the bucket; see `run_lease`), queues and sessions belong to that
   manager, and the janitor ends without a change.
2. Otherwise it deletes the queues that the run created, except a dead-letter queue that holds messages, which stays
   as evidence. It records the run's sessions as closed and stops them.
3. If the bucket cannot be read, it changes nothing.

Invariant: it ends a bounded time after the run.

A run that restarts after the grace time creates its queue again (SQS blocks a deleted name for a minute) and finds
published results in S3.

`janitor_process` starts the process and reports to it; `__main__` is the process.
"""
