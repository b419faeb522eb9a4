import asyncio

from common import MODEL, QUESTIONS, SYSTEM, add
from fast_agent import FastAgent

# connect
fast = FastAgent("adder", parse_cli_args=False, quiet=True)
model = f"generic.{MODEL}"
# connected


@fast.agent(instruction=SYSTEM, model=model, function_tools=[add])
async def main() -> None:
    async with fast.run() as agent:
        for question in QUESTIONS:
            said = await agent.send(question)
        print(said)


asyncio.run(main())
