"""Calls from the gateway to the engines: `client` makes a call in the protocol of `sglang` or `vllm`."""
