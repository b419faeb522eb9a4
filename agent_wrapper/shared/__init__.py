"""What the training side does in the same way as an agent's container, beside the contract."""
