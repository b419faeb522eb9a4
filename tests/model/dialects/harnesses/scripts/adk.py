import asyncio

from common import API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add
from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner

# connect
model = LiteLlm(model=f"openai/{MODEL}", api_base=BASE_URL, api_key=API_KEY)
# connected

agent = LlmAgent(name="calculator", model=model, instruction=SYSTEM, tools=[add])
events = asyncio.run(InMemoryRunner(agent=agent).run_debug(list(QUESTIONS), quiet=True))
print(events[-1].content.parts[0].text)
