import asyncio

from common import API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add
from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

# connect
client = AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY)
service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)
# connected


class Sums:
    add = staticmethod(kernel_function(add))


async def main() -> None:
    agent = ChatCompletionAgent(service=service, name="calculator", instructions=SYSTEM, plugins=[Sums()])
    thread = None
    for question in QUESTIONS:
        answer = await agent.get_response(messages=question, thread=thread)
        thread = answer.thread
    print(answer.content)


asyncio.run(main())
