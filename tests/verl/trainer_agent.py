"""The agent of the trainers' tests. Its payload says what becomes of each session, by the number in its group."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from openai import AsyncOpenAI

from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()


@app.entrypoint
async def agent(context: RolloutContext) -> dict[str, object]:
    """`name` of the group, `rewards` of its sessions; `do`: {number: what befalls it}; `segments` of each session."""
    payload, seen = context.payload, Path(os.environ["SEEN"])
    number = str(context.rollout_id).rpartition(".")[2]

    async with AsyncOpenAI(**context.openai_kwargs()) as client:

        async def ask(question: str) -> None:
            messages = [{"role": "user", "content": question}]
            await client.chat.completions.create(model=context.model, messages=messages)  # type: ignore[arg-type]

        for segment in range(payload.get("segments", 1)):
            await ask(f"{payload['name']} {segment}")
        (seen / str(context.rollout_id)).write_text(payload["name"])
        match payload.get("do", {}).get(number):
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise ValueError("the tool is broken")
            case "never return":
                await asyncio.Event().wait()
            case "wait for go":
                while not (seen / "go").exists():
                    assert context.remaining_s, "nobody said go"
                    await asyncio.sleep(0.05)
                await ask("go")
    return {"reward": payload["rewards"][int(number)]}


if __name__ == "__main__":
    app.run()
