"""Answer a question with a tool, using strands-agents, and score the answer."""

import re

from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.models.openai import OpenAIModel

from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()


@tool
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def score(reply: str, answer: str) -> float:
    """Return 1 if the last integer of the reply is the answer, else 0."""
    numbers = re.findall(r"-?\d+", reply)
    return float(numbers[-1:] == [answer])


@app.entrypoint
async def agent(context: RolloutContext) -> dict[str, object]:
    solver = Agent(
        model=OpenAIModel(client_args=context.openai_kwargs(), model_id=context.model),
        tools=[add],
        callback_handler=None,  # the default prints each token
        conversation_manager=NullConversationManager(),  # a shortened history would start a new training sequence
        retry_strategy=None,  # the client retries already
    )
    result = await solver.invoke_async(context.payload["question"], limits={"turns": 8})
    reply = str(result)
    return {"reward": score(reply, context.payload["answer"]), "reply": reply}


if __name__ == "__main__":
    app.run()
