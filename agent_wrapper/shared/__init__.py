"""Code that the training side and an agent's container share, besides the contract."""
