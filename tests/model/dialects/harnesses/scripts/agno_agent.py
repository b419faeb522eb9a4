from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai.like import OpenAILike
from common import API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add

# connect
model = OpenAILike(id=MODEL, base_url=BASE_URL, api_key=API_KEY)
# connected

agent = Agent(
    model=model,
    tools=[add],
    system_message=SYSTEM,
    db=InMemoryDb(),
    add_history_to_context=True,
    num_history_runs=10,
    telemetry=False,
)
for question in QUESTIONS:
    said = agent.run(question, session_id="one")
print(said.content)
