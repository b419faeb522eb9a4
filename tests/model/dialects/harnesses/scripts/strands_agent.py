from common import API, API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel

# connect
if API == "messages":
    model = AnthropicModel(client_args={"base_url": BASE_URL, "api_key": API_KEY}, model_id=MODEL, max_tokens=2048)
else:
    model = OpenAIModel(client_args={"base_url": BASE_URL, "api_key": API_KEY}, model_id=MODEL)
agent = Agent(
    model=model,
    tools=[tool(add)],
    system_prompt=SYSTEM,
    conversation_manager=NullConversationManager(),
    retry_strategy=None,
)
# connected

for question in QUESTIONS:
    result = agent(question)
print(result)
