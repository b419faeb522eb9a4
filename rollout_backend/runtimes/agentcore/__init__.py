"""AWS Bedrock AgentCore Runtime."""
