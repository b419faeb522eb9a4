"""The runtime for AWS Bedrock AgentCore."""
