"""Run everything on one machine: S3, SQS, an AgentCore stand-in, scripted engines, fault proxies, test fixtures."""
