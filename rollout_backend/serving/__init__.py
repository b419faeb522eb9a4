"""Starts, watches and stops the model servers behind the router."""
