"""The runtime for Kubernetes. Each attempt is one Job, whose pod runs the agent's image once."""
