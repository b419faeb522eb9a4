import dspy
from common import API_KEY, BASE_URL, MODEL, QUESTIONS, add

# connect
model = dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key=API_KEY, cache=False)
# connected

dspy.configure(lm=model)
react = dspy.ReAct("question -> answer", tools=[add])
print(react(question=" ".join(QUESTIONS)).answer)
