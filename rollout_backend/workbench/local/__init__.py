"""Run everything on one machine: S3, SQS, an AgentCore emulator, scripted engines and test fixtures."""
