"""Open a lock with a tool that reads one digit of its code at a time, in one conversation.

The tool `look` reads the next note: the next digit of the code, repeated. A reply without a call is the code. The
payload has the `code`. The reward is the part of its digits that the reply has in their places.
"""

from openai import AsyncOpenAI

from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()

# A byte-level model notices a repeated digit sooner.
NOTE = 8
# Of a reply.
MAX_TOKENS = 64
# In the order in which verl writes a tool, so that both loops have the same prompt.
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Read the next digit.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


def question(code: str) -> str:
    return f"A lock of {len(code)} digits"


def note(code: str, looks: int) -> str:
    """Return what `look` reads after this many looks."""
    return code[looks] * NOTE if looks < len(code) else "-"


def max_replies(code: str) -> int:
    return len(code) + 2


def score(reply: str, code: str) -> float:
    """Return the part of the digits that are right. A reply of another length, such as a call, gets 0."""
    return sum(a == b for a, b in zip(reply, code, strict=True)) / len(code) if len(reply) == len(code) else 0.0


@app.entrypoint
async def agent(context: RolloutContext) -> dict[str, object]:
    code, looks, said = context.payload["code"], 0, ""
    messages: list[dict[str, object]] = [{"role": "user", "content": question(code)}]
    async with AsyncOpenAI(**context.openai_kwargs()) as client:
        for _ in range(max_replies(code)):
            completion = await client.chat.completions.create(
                model=context.model, messages=messages, tools=[LOOK], max_tokens=MAX_TOKENS
            )
            reply = completion.choices[0].message
            if not reply.tool_calls:
                said = reply.content or ""
                break
            messages.append(reply.model_dump(exclude_none=True))
            # As verl's loop does by default, only the first call of a reply is made.
            content = note(code, looks)
            messages.append({"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": content})
            looks += 1
    reward = score(said, code)
    return {"reward": reward, "won": reward == 1, "tool_calls": looks}


if __name__ == "__main__":
    app.run()
