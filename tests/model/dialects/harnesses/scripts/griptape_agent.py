from common import API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM
from common import add as plus
from griptape.artifacts import TextArtifact
from griptape.drivers.prompt.openai import OpenAiChatPromptDriver
from griptape.rules import Rule
from griptape.structures import Agent
from griptape.tokenizers import SimpleTokenizer
from griptape.tools import BaseTool
from griptape.utils.decorators import activity
from schema import Schema

# connect
driver = OpenAiChatPromptDriver(
    model=MODEL,
    base_url=BASE_URL,
    api_key=API_KEY,
    tokenizer=SimpleTokenizer(characters_per_token=4, max_input_tokens=32_000, max_output_tokens=4096),
)
# connected


class Sums(BaseTool):
    @activity(config={"description": "Adds two numbers.", "schema": Schema({"a": int, "b": int})})
    def add(self, params):
        return TextArtifact(plus(**params["values"]))


agent = Agent(prompt_driver=driver, tools=[Sums()], rules=[Rule(SYSTEM)])
for question in QUESTIONS:
    said = agent.run(question)
print(said.output_task.output.value)
