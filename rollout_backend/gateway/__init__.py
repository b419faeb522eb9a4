"""The sessions' way to the model: an OpenAI endpoint in front, token ids behind, and a record of what was sampled."""
