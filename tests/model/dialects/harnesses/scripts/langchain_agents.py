import sys

from common import API, API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add
from deepagents import create_deep_agent
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

# connect
if API == "messages":
    model = ChatAnthropic(model=MODEL, base_url=BASE_URL, api_key=API_KEY, max_tokens=2048)
else:
    model = ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key=API_KEY, use_responses_api=API == "responses")
# connected

agent = {
    "LangChain": lambda: create_agent(model, [add], system_prompt=SYSTEM, name="calculator"),
    "LangGraph": lambda: create_react_agent(model, [add], prompt=SYSTEM, name="calculator"),
    "deepagents": lambda: create_deep_agent(model, [add], system_prompt=SYSTEM),
}[sys.argv[1]]()
messages = []
for question in QUESTIONS:
    messages = agent.invoke({"messages": [*messages, {"role": "user", "content": question}]})["messages"]
print(messages[-1].text)
