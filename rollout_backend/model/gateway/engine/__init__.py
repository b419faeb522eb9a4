"""Calls from the gateway to the engines: `client` makes a call in a `protocol`, and `engines` tracks the engines."""
