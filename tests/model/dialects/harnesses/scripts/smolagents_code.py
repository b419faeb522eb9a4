from common import API_KEY, BASE_URL, MODEL, QUESTIONS, add
from smolagents import CodeAgent, OpenAIServerModel, tool

# connect
model = OpenAIServerModel(MODEL, api_base=BASE_URL, api_key=API_KEY)
# connected

agent = CodeAgent(tools=[tool(add)], model=model)
for question in QUESTIONS:
    answer = agent.run(question, reset=False)
print(answer)
