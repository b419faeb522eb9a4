"""Convert messages to tokens and tokens to messages, with the model's own format."""
