"""Ask the model one question, with the OpenAI SDK, and score its answer."""

import re

from openai import AsyncOpenAI

from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()


def score(reply: str, answer: str) -> float:
    """Return 1 if the last integer of the reply is the answer, else 0."""
    numbers = re.findall(r"-?\d+", reply)
    return float(numbers[-1:] == [answer])


@app.entrypoint
async def agent(context: RolloutContext) -> dict[str, object]:
    async with AsyncOpenAI(**context.openai_kwargs()) as client:
        completion = await client.chat.completions.create(
            model=context.model,
            messages=[{"role": "user", "content": context.payload["question"]}],
        )
    reply = completion.choices[0].message.content or ""
    return {"reward": score(reply, context.payload["answer"]), "reply": reply}


if __name__ == "__main__":
    app.run()
