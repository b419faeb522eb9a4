import asyncio

from common import API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import Memory
from llama_index.llms.openai_like import OpenAILike

# connect
llm = OpenAILike(model=MODEL, api_base=BASE_URL, api_key=API_KEY, is_chat_model=True, is_function_calling_model=True)
# connected


async def main() -> None:
    agent = FunctionAgent(llm=llm, tools=[add], system_prompt=SYSTEM)
    memory = Memory.from_defaults()
    for question in QUESTIONS:
        answer = await agent.run(question, memory=memory)
    print(answer)


asyncio.run(main())
