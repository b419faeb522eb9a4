"""Add two numbers of reasoning-gym with a tool, whose last result is the answer. reasoning-gym scores it.

The payload's `seed` chooses the problem.
"""

import json
import operator

import reasoning_gym
from openai import AsyncOpenAI

from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
DATASET = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+"],
    "allow_parentheses": False,
    "allow_negation": False,
    "size": 1,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "apply",
        "description": "Apply an operator to the two numbers",
        "parameters": {"type": "object", "properties": {"operator": {"type": "string"}}, "required": ["operator"]},
    },
}
MAX_TURNS, MAX_TOKENS = 4, 88


def apply(arguments: str, expression: str) -> str:
    """Return the result of a call, or what is wrong with it."""
    left, _, right = expression.split()
    try:
        return str(OPERATORS[json.loads(arguments)["operator"]](int(left), int(right)))
    except (ValueError, KeyError, TypeError):
        return "error"


@app.entrypoint
async def agent(context: RolloutContext) -> dict[str, object]:
    problems = reasoning_gym.create_dataset("basic_arithmetic", seed=context.payload["seed"], **DATASET)
    problem = problems[0]
    messages = [{"role": "user", "content": problem["question"]}]
    calls, answer = 0, ""
    async with AsyncOpenAI(**context.openai_kwargs()) as client:
        for _ in range(MAX_TURNS):
            completion = await client.chat.completions.create(
                model=context.model, messages=messages, tools=[TOOL], max_tokens=MAX_TOKENS
            )
            message = completion.choices[0].message
            if not message.tool_calls:
                answer = answer or message.content or ""
                break
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                calls += 1
                answer = apply(call.function.arguments, problem["metadata"]["expression"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
    reward = float(problems.score_answer(answer=answer.strip(), entry=problem))
    return {"reward": reward, "won": reward >= 1, "tool_calls": calls}


if __name__ == "__main__":
    app.run()
