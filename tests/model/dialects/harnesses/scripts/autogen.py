import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from common import API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add

# connect
client = OpenAIChatCompletionClient(
    model=MODEL,
    base_url=BASE_URL,
    api_key=API_KEY,
    model_info={
        "family": "unknown",
        "function_calling": True,
        "json_output": False,
        "structured_output": False,
        "vision": False,
    },
)
# connected


async def main() -> None:
    agent = AssistantAgent("calculator", client, tools=[add], system_message=SYSTEM, max_tool_iterations=5)
    for question in QUESTIONS:
        result = await agent.run(task=question)
    print(result.messages[-1].content)


asyncio.run(main())
