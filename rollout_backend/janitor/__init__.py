"""What a run leaves behind when it dies without a word, and the process that puts it in order.

A run that ends by itself closes its sessions and deletes its queues. One that is killed cannot, and under verl every
run is, for Ray ends its processes without their exit hooks. So each run has a janitor beside it: a process in a
session of its own, which only waits until the run says that all is done, or is dead. The rule:

- A run is owned by whoever last wrote `runs/RUN/owner` in the bucket. The owner writes it before it makes a queue.
- The janitor of a dead run waits `janitor.grace_s`. If that object has another owner by then, the run has been
  started again: the queues and the sessions are the new owner's, and the janitor ends without touching either.
- Else it deletes the queues that were made for the run (a dead-letter queue that holds messages stays, as evidence)
  and stops the sessions that were open; before that, the run's notes of agents at work, which are none any more.
- If the bucket cannot be asked, it touches nothing.
- It ends a bounded time after the run, whatever happens.

A run started again only after the grace finds its queue gone, makes it anew (SQS blocks a deleted name for a minute),
and finds what was published in S3, as it always does.

`owner` is the run's side of it; `__main__` is the janitor.
"""
