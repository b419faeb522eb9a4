"""Relay mode: agents that cannot reach the training cluster call a relay, to which the training side connects.

    agent -- HTTP --> relay (server) <== one WebSocket, dialled from the training side == dialer -- HTTP --> gateway

The relay runs near the agents. It forwards each call unchanged (method, path, headers, body) and streams the answer
back. The gateway, the tokenizer, the key-signing secret and the trajectories stay on the training side; the relay
holds only calls in flight. An attacker who controls the relay can read the traffic, but cannot sign a key or reach a
control path.

Invariants:

- Memory is bounded: each call has a window in each direction, and a slow reader delays only its own call.
- A dropped WebSocket loses nothing: each side resends what the other has not received. If the outage lasts too long,
  or another process answers, calls in flight fail. Before the answer has begun, they fail with 502 to 504 and
  Retry-After, which SDKs retry; later, with a closed connection, which no client takes for a complete answer.
- When an agent disconnects, its call at the gateway is aborted.
- Each side proves that it knows the key without sending it.

Modules: `protocol` (the messages, and mutual authentication), `forwarding` (which calls are allowed), `exchange`
(calls across reconnects), `relay_server`, `dialer`, and `cli`, which runs the relay. `serving.model_serving` runs the
dialer for the manager.
"""
