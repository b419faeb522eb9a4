"""Run agents that were written for another framework, unchanged: `runtime.agent_protocol`.

The training side does what `agent_wrapper` does in a container: it reads the agent's result, fetches the sealed
trajectory, and writes one rollout under the contract's key. Buffer, step and rows are the same as for wrapped agents.

To add a protocol, write a class that implements `base.AgentProtocol` in a module here, list it in `translator`, and
add its name to `RuntimeConfig.agent_protocol`.
"""
