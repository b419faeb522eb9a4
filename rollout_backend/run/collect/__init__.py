"""Collect results from S3.

`buffer` receives announcements, lists S3 to find lost ones, and delivers validated rollouts to their step. `queue` is
SQS and `store` is S3.

A result is refused by `agent_wrapper.contract.codec` (hostile bytes), `core.seal` (tokens that were not sampled) or
`fetcher` (wrong fields, or another session), which keeps the evidence in quarantine.
"""
