"""The gateway process: an OpenAI and Anthropic endpoint for agents, with token ids behind it.

`server` is the HTTP server, `call_handler` takes a call and `model_call_executor` executes it. `sessions` holds what
was sampled in each session, with its journal; `engine` calls the engines.
`serving.gateway_process` starts the process.
"""
