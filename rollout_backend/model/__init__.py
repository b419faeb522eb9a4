"""What serves the model to agents: the gateway and its APIs, tokens, engines, routers and the relay."""
