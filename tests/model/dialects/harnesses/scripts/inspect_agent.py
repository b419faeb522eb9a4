from common import API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add
from inspect_ai import Task, eval
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.tool import ToolDef

# connect
model = get_model(f"openai-api/rollout/{MODEL}", base_url=BASE_URL, api_key=API_KEY)
# connected

tool = ToolDef(add, "add", "Adds two numbers.", {"a": "a number", "b": "a number"}).as_tool()
task = Task([Sample(" ".join(QUESTIONS))], react(prompt=SYSTEM, tools=[tool]))
[log] = eval(task, model, display="plain", log_dir="logs")
print(log.samples[0].output.completion)
