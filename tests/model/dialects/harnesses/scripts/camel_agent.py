from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter
from common import API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add


class Characters(BaseTokenCounter):
    def count_tokens_from_messages(self, messages):
        return sum(len(str(message)) for message in messages) // 4

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(token_ids).decode()


# connect
model = ModelFactory.create(
    model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
    model_type=MODEL,
    url=BASE_URL,
    api_key=API_KEY,
    token_counter=Characters(),  # a BaseTokenCounter; the default one downloads a vocabulary
)
# connected

agent = ChatAgent(SYSTEM, model=model, tools=[FunctionTool(add)])
for question in QUESTIONS:
    said = agent.step(question)
print(said.msgs[0].content)
