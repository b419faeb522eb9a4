"""S3, SQS and AgentCore for load tests, by their wire protocols. `benchmarks/emulator.py` serves them."""
