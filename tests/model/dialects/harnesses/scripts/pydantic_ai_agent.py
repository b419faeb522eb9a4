from common import API, API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

# connect
if API == "messages":
    model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=BASE_URL, api_key=API_KEY))
else:
    kind = OpenAIResponsesModel if API == "responses" else OpenAIChatModel
    model = kind(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=API_KEY))
# connected

agent = Agent(model, instructions=SYSTEM, tools=[add])
history = []
for question in QUESTIONS:
    result = agent.run_sync(question, message_history=history)
    history = result.all_messages()
print(result.output)
