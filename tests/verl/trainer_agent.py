"""The agent of the trainers' tests. Its payload says what becomes of each session, by the number in its group."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()


@app.entrypoint
async def agent(context: RolloutContext) -> dict[str, object]:
    """`name` of the group, `rewards` of its sessions; `do`: {number: what befalls it}; `segments` of each session.

    `image` is shown with every question.

    `baseline` is the reward of the greedy one, whose number is "greedy"; `max_tokens` is of each call.

    A session that is to "wait for X" goes on with its last conversation once there is a file X beside its own.
    """
    payload, seen = context.payload, Path(os.environ["SEEN"])
    task, _, number = str(context.rollout_id).rpartition(".")
    rewards = {str(i): reward for i, reward in enumerate(payload["rewards"])}
    if task.endswith("-greedy"):  # the baseline of REMAX
        number, rewards = "greedy", {"greedy": payload["baseline"]}

    async with AsyncOpenAI(**context.openai_kwargs()) as client:

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
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise ValueError("the tool is broken")
            case "tell":  # of a model called elsewhere; with `segments` 0 none is called here
                said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"reply {number}"}]
                return {"reward": payload["rewards"][int(number)], "messages": said}
            case "never return":
                await asyncio.Event().wait()
            case str(wait) if wait.startswith("wait for "):
                while not (seen / wait.removeprefix("wait for ")).exists():
                    assert context.remaining_s, f"nobody came: {wait}"
                    await asyncio.sleep(0.05)
                await ask("go", *history)
    return {"reward": rewards[number]}


if __name__ == "__main__":
    app.run()
