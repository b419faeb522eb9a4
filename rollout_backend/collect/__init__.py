"""Collect results from S3.

`buffer` receives announcements, lists S3 for lost ones, and delivers validated rollouts to their step. `queue` is SQS
and `store` is S3. `decode` refuses invalid results.
"""
