import asyncio

from ag2 import Agent
from ag2.config import AnthropicConfig, OpenAIConfig, OpenAIResponsesConfig
from common import API, API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add

# connect
kind = {"chat": OpenAIConfig, "responses": OpenAIResponsesConfig, "messages": AnthropicConfig}[API]
config = kind(model=MODEL, base_url=BASE_URL, api_key=API_KEY)
# connected


async def main() -> None:
    agent = Agent("adder", SYSTEM, config=config, tools=[add])
    said = await agent.ask(QUESTIONS[0])
    said = await said.ask(QUESTIONS[1])
    print(said.body)


asyncio.run(main())
