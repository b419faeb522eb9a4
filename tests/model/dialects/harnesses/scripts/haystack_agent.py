from common import API, API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

# connect
kind = OpenAIResponsesChatGenerator if API == "responses" else OpenAIChatGenerator
generator = kind(model=MODEL, api_base_url=BASE_URL, api_key=Secret.from_token(API_KEY))
# connected

agent = Agent(chat_generator=generator, tools=[create_tool_from_function(add)], system_prompt=SYSTEM)
messages = []
for question in QUESTIONS:
    messages = agent.run(messages=[*messages[1:], ChatMessage.from_user(question)])["messages"]
print(messages[-1].text)
