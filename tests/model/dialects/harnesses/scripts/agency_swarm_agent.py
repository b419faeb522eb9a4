import asyncio

from agency_swarm import Agency, Agent, OpenAIChatCompletionsModel, function_tool
from agents import set_tracing_disabled
from common import API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add
from openai import AsyncOpenAI

# connect
model = OpenAIChatCompletionsModel(model=MODEL, openai_client=AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY))
# connected


async def main() -> None:
    set_tracing_disabled(True)
    agency = Agency(Agent(name="adder", instructions=SYSTEM, model=model, tools=[function_tool(add)]))
    for question in QUESTIONS:
        said = await agency.get_response(question)
    print(said.final_output)


asyncio.run(main())
