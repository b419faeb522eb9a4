"""Answer a question with a tool, in AWS's SDK. In a rollout, its model calls go to the model being trained."""

from strands import Agent, tool

from agent_wrapper.bedrock_agentcore import BedrockAgentCoreApp

app = BedrockAgentCoreApp()


@tool
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@app.entrypoint
def invoke(payload: dict[str, str]) -> dict[str, str]:
    agent = Agent(tools=[add], callback_handler=None)
    return {"result": str(agent(payload["question"]))}


if __name__ == "__main__":
    app.run()
