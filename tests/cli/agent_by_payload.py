"""Run as a script: an agent whose rollouts do what `do` in their payload says, each by its number."""

import asyncio

from openai import AsyncOpenAI

from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()


@app.entrypoint
async def agent(context: RolloutContext) -> dict[str, object]:
    number = int((context.rollout_id or "").rpartition(".")[2])
    do = context.payload["do"][number]
    if do == "raise":
        raise ValueError("no such answer")
    if do == "sleep":
        await asyncio.sleep(3600)
    if do != "silent":
        async with AsyncOpenAI(**context.openai_kwargs()) as client:
            await client.chat.completions.create(
                model=context.model, messages=[{"role": "user", "content": f"do {do}"}]
            )
    return {"reward": float(do) if isinstance(do, int) else 1.0}


if __name__ == "__main__":
    app.run()
