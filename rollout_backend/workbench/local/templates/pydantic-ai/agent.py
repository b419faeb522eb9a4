"""Answer a question with a tool, using pydantic-ai, and score the answer."""

import re

from openai import AsyncOpenAI
from pydantic_ai import Agent, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()
solver = Agent()


@solver.tool_plain
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def score(reply: str, answer: str) -> float:
    """Return 1 if the last integer of the reply is the answer, else 0."""
    numbers = re.findall(r"-?\d+", reply)
    return float(numbers[-1:] == [answer])


@app.entrypoint
async def agent(context: RolloutContext) -> dict[str, object]:
    async with AsyncOpenAI(**context.openai_kwargs()) as client:
        model = OpenAIChatModel(context.model, provider=OpenAIProvider(openai_client=client))
        limits = UsageLimits(request_limit=8)
        result = await solver.run(context.payload["question"], model=model, usage_limits=limits)
    return {"reward": score(result.output, context.payload["answer"]), "reply": result.output}


if __name__ == "__main__":
    app.run()
