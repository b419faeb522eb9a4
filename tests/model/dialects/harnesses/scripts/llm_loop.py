from common import API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add
from llm.default_plugins.openai_models import Chat

# connect
model = Chat(MODEL, api_base=BASE_URL, supports_tools=True)
model.key = API_KEY
# connected

conversation = model.conversation(tools=[add])
for question in QUESTIONS:
    said = conversation.chain(question, system=SYSTEM).text()
print(said)
