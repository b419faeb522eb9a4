import asyncio

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from common import API, API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add

# connect
kind = OpenAIChatClient if API == "responses" else OpenAIChatCompletionClient
client = kind(model=MODEL, base_url=BASE_URL, api_key=API_KEY)
agent = Agent(client, SYSTEM, tools=[add], default_options={"store": False})
# connected


async def main() -> None:
    session = agent.create_session()
    for question in QUESTIONS:
        answer = await agent.run(question, session=session)
    print(answer.text)


asyncio.run(main())
