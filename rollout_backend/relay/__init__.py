"""Relay mode: agents that cannot reach the training cluster call a relay, and the training side dials out to it.

    agent -- HTTP --> relay (server) <== one WebSocket, dialled from the training side == dialer -- HTTP --> gateway

The relay runs near the agents. It forwards each call unchanged (method, path, headers, body) and streams the answer
back. Gateway, tokenizer, the secret of the session keys and trajectories stay on the training side: the relay holds
only calls in flight, no model file and no session. An attacker who controls the relay can read the traffic, but can
sign no key and reach no control path.

Invariants:

- Memory is bounded: each call has a window in each direction, and a slow reader delays only its own call.
- A cut of the WebSocket loses nothing: each side resends what the other has not received. If the cut lasts too long,
  or another process answers, calls in flight end: before the answer has begun with 502 to 504 and Retry-After, which
  SDKs retry; after it has begun with a closed connection, which no client takes for a complete answer.
- An agent that disconnects ends its call at the gateway.
- Both sides prove that they know the key, and neither sends it.

Modules: `frames` (the messages), `handshake` (mutual authentication), `routes` (which calls are allowed), `channel`
(the two streams of one call), `exchange` (all calls over one link after another), `relay_server`, `dialer`, and
`cli`, which runs the relay. `serving.model_serving` runs the dialer for the manager.
"""
