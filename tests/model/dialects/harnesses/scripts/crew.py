from common import API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

# connect
llm = LLM(model=f"openai/{MODEL}", base_url=BASE_URL, api_key=API_KEY)
# connected

agent = Agent(role="calculator", goal=SYSTEM, backstory="Adds.", tools=[tool("add")(add)], llm=llm)
task = Task(description=" ".join(QUESTIONS), expected_output="two numbers", agent=agent)
print(Crew(agents=[agent], tasks=[task]).kickoff())
