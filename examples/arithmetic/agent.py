"""Ask the model one question and score its answer: the smallest agent."""

import re

from openai import AsyncOpenAI

from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()


def is_right(reply: str, answer: str) -> bool:
    """Return whether the last integer of the reply is the answer."""
    numbers = re.findall(r"-?\d+", reply)
    return bool(numbers) and int(numbers[-1]) == int(answer)


@app.entrypoint
async def agent(context: RolloutContext) -> dict[str, object]:
    async with AsyncOpenAI(**context.openai_kwargs()) as client:
        completion = await client.chat.completions.create(
            model=context.model,
            messages=[{"role": "user", "content": context.payload["question"]}],
        )
    reply = completion.choices[0].message.content or ""
    return {"reward": is_right(reply, context.payload["answer"]), "reply": reply}


if __name__ == "__main__":
    app.run()
