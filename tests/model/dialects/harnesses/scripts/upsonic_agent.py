import asyncio

from common import API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add
from upsonic import Agent, Chat
from upsonic.models.openai import OpenAIChatModel
from upsonic.providers.openai import OpenAIProvider

# connect
model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=API_KEY))
# connected


async def main() -> None:
    agent = Agent(model, system_prompt=SYSTEM, tools=[add])
    chat = Chat("session", "user", agent, feed_tool_call_results=True)
    for question in QUESTIONS:
        said = await chat.invoke(question)
    print(said)


asyncio.run(main())
