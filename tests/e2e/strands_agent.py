"""An agent as the documentation of AWS shows it, with one line changed: the import of its app."""

from strands import Agent, tool

from agent_wrapper.bedrock_agentcore import BedrockAgentCoreApp

app = BedrockAgentCoreApp()


@tool
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


agent = Agent(tools=[add])


@app.entrypoint
def invoke(payload):
    """Your AI agent function"""
    user_message = payload.get("prompt", "Hello! How can I help you today?")
    result = agent(user_message)
    return {"result": result.message}


if __name__ == "__main__":
    app.run()
