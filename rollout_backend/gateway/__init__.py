"""The gateway process: an OpenAI and Anthropic endpoint for agents, with token ids behind it.

`server` is the HTTP server, `model_call_executor` executes a call, `conversations` and `journal` record what
was sampled, `session_registry` keeps the sessions.
`serving.gateway_process` starts the process.
"""
