"""Answer a sum, then check the answer: an agent of two model calls, between which its trainer may be killed."""

from openai import AsyncOpenAI

from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()


@app.entrypoint
async def agent(context: RolloutContext) -> dict[str, object]:
    reply, messages = "", []
    async with AsyncOpenAI(**context.openai_kwargs()) as client:
        for question in (context.payload["question"], "Are you sure?"):
            messages.append({"role": "user", "content": question})
            completion = await client.chat.completions.create(model=context.model, messages=messages)
            reply = completion.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": reply})
    return {"reward": float(reply.endswith(f" {context.payload['answer']}.")), "reply": reply}


if __name__ == "__main__":
    app.run()
