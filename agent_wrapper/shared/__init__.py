"""Code that the training side and an agent's container have in common, beside the contract."""
