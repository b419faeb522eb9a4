from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import API, API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add
from openai import AsyncOpenAI

# connect
set_tracing_disabled(True)
kind = OpenAIResponsesModel if API == "responses" else OpenAIChatCompletionsModel
model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY))
# connected

agent = Agent("calculator", instructions=SYSTEM, model=model, tools=[function_tool(add)])
history = []
for question in QUESTIONS:
    result = Runner.run_sync(agent, [*history, {"role": "user", "content": question}])
    history = result.to_input_list()
print(result.final_output)
