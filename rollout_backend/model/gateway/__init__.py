"""The gateway process: an OpenAI and Anthropic endpoint for agents, with token ids behind it.

`server` is the HTTP server, `call_handler` handles a model call and `model_call_executor` executes it. `sessions`
stores and journals what each session sampled; `engine` calls the engines. On its way, a dialect's request becomes a
`ModelCall`, a `Prompt`, an `EngineRequest`, a `Completion` of the engine, and an `Answer` of `Choice`s.
`serving.gateway_process` starts the process.
"""
