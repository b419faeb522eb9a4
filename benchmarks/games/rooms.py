"""Leave a row of rooms with a tool, and start a new conversation in each room.

The tool `look` reads the note on the wall, which is the number of the door that leads on. A reply without a call
opens a door. A wrong door or a third call ends the game.

The payload has the number of `rooms`, and the `seed` of their doors. The reward is the part of the rooms that it
left.
"""

import random

from openai import AsyncOpenAI

from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()

DOORS = "1234"
NOTE = 8  # digits: a byte-level model notices a repeated one sooner
MAX_CALLS, MAX_TOKENS = 2, 64  # in a room, and of a reply
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@app.entrypoint
async def agent(context: RolloutContext) -> dict[str, object]:
    doors = random.Random(context.payload["seed"]).choices(DOORS, k=context.payload["rooms"])
    left = calls = 0
    async with AsyncOpenAI(**context.openai_kwargs()) as client:
        for door in doors:
            messages: list[dict[str, object]] = [{"role": "user", "content": f"Room {'ABCDEFGH'[left]}"}]
            for _ in range(MAX_CALLS + 1):
                completion = await client.chat.completions.create(
                    model=context.model, messages=messages, tools=[LOOK], max_tokens=MAX_TOKENS
                )
                reply = completion.choices[0].message
                if not reply.tool_calls:
                    break
                calls += len(reply.tool_calls)
                messages.append(reply.model_dump(exclude_none=True))
                messages += [
                    {"role": "tool", "tool_call_id": each.id, "content": door * NOTE} for each in reply.tool_calls
                ]
            if reply.content != door:
                break
            left += 1
    return {"reward": left / len(doors), "won": left == len(doors), "tool_calls": calls}


if __name__ == "__main__":
    app.run()
