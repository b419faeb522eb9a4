"""Emulate services for tests: Kubernetes, CodeBuild, the policies of IAM, vLLM, and experts of scripted engines."""
