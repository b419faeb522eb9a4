"""How the gateway calls engines: `client` makes a call, in the protocol of `sglang` or `vllm`."""
