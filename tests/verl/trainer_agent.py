"""The agent of the trainer tests. Its payload says how each session of the group ends."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()


@app.entrypoint
async def agent(context: RolloutContext) -> dict[str, object]:
    """Run one session.

    The payload's fields:

    - `name` of the group, `rewards` of its sessions, `segments` per session, `max_tokens` per call.
    - `do`: {number: what the session does}. With "wait for X" it continues when a file X exists in its folder; with
      "ask until X" it asks further questions until then and one after that, each in a new segment.
    - `image`: sent with every question.
    - `baseline`: the reward of the greedy session, whose number is "greedy".
    """
    payload, seen = context.payload, Path(os.environ["SEEN"])
    first = str(context.rollout_id).partition(".g")[0]  # a step that is planned again appends its generation
    task, _, number = first.rpartition(".")
    rewards = {str(i): reward for i, reward in enumerate(payload["rewards"])}
    if task.endswith("-greedy"):  # REMAX's baseline
        number, rewards = "greedy", {"greedy": payload["baseline"]}

    # Restarts of the trainer take longer than the default number of retries if the machine is busy.
    async with AsyncOpenAI(**context.openai_kwargs() | {"max_retries": 10_000}) as client:

        async def ask(question: str, *history: Any) -> list[Any]:
            content: Any = question
            if "image" in payload:
                content = [
                    {"type": "image_url", "image_url": {"url": payload["image"]}},
                    {"type": "text", "text": question},
                ]
            messages = [*history, {"role": "user", "content": content}]
            limit = payload.get("max_tokens")
            reply = await client.chat.completions.create(model=context.model, messages=messages, max_tokens=limit)
            return [*messages, {"role": "assistant", "content": reply.choices[0].message.content}]

        history: list[Any] = []
        for segment in range(payload.get("segments", 1)):
            history = await ask(f"{payload['name']} {segment}")
        (seen / str(context.rollout_id)).write_text(payload["name"])
        match payload.get("do", {}).get(number):
            case "raise":
                raise ValueError("the tool is broken")
            case str(wait) if wait.startswith("wait for "):
                while not (seen / wait.removeprefix("wait for ")).exists():
                    assert context.remaining_s, f"timed out: {wait}"
                    await asyncio.sleep(0.05)
                await ask("go", *history)
            case str(until) if until.startswith("ask until "):
                while not (seen / until.removeprefix("ask until ")).exists():
                    assert context.remaining_s, f"timed out: {until}"
                    await ask("again")
                await ask("last")
    return {"reward": rewards[number]}


if __name__ == "__main__":
    app.run()
