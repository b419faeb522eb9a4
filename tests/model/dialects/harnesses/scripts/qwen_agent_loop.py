from common import API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM
from common import add as plus
from qwen_agent.agents import FnCallAgent
from qwen_agent.tools.base import BaseTool

# connect
llm = {
    "model_type": "oai",
    "model": MODEL,
    "model_server": BASE_URL,
    "api_key": API_KEY,
    "generate_cfg": {"use_raw_api": True},
}
# connected


class Add(BaseTool):
    name = "add"
    description = "Adds two numbers."
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    }

    def call(self, params, **more):
        return str(plus(**self._verify_json_format_args(params)))


agent = FnCallAgent([Add()], llm, SYSTEM)
messages = []
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    *_, said = agent.run(messages)
    messages.extend(said)
print(messages[-1]["content"])
