"""From a result in S3 to a settled rollout."""
