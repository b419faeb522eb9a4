"""Relay mode: agents that cannot reach the training cluster reach a relay, and the training side dials out to it.

    agent -- HTTP --> relay (server) <== one WebSocket, dialled from the training side == dialer -- HTTP --> gateway

The relay runs near the agents. It passes each call on as it is (method, path, headers, body) and streams the answer
back. Gateway, tokenizer, session keys' secret and trajectories stay on the training side: the relay holds calls in
flight and nothing else, no model file and no session. Whoever takes it over can read the calls that pass through it,
but can sign no key and reaches no control path.

What must always hold:

- Memory is bounded: each call has a window in each direction, and whoever reads slowly holds up only its own call.
- A cut of the WebSocket loses nothing: what the other side has not received is sent again. If it lasts too long, or
  the process at the other end is another one, calls in flight end: before an answer has begun with a 502 to 504 and
  Retry-After, which SDKs try again, and after it by an abrupt end, which nobody can take for a whole answer.
- An agent that hangs up ends its call at the gateway.
- Both sides prove that they know the key, and neither sends it.

Modules: `frames` (what is said), `handshake` (who is there), `routes` (what may pass), `channel` (one call's two
streams), `exchange` (all calls over one link after another), `server`, `dialer`; `process` runs the dialer for the
manager, `cli` the relay.
"""
