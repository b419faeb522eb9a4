"""Convert messages to tokens and tokens to messages, in the model's own format."""
