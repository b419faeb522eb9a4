import asyncio
import json
from pathlib import Path

from common import API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add
from nat.builder.builder import Builder
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_function
from nat.data_models.api_server import ChatRequest
from nat.data_models.function import FunctionBaseConfig
from nat.runtime.loader import load_workflow

# connect
llms = {"llm": {"_type": "openai", "model_name": MODEL, "base_url": BASE_URL, "api_key": API_KEY}}
# connected


class Add(FunctionBaseConfig, name="add"):
    pass


@register_function(config_type=Add)
async def register(config: Add, builder: Builder):
    async def run(a: int, b: int) -> int:
        return add(a, b)

    yield FunctionInfo.from_fn(run, description=add.__doc__)


agent = {"_type": "tool_calling_agent", "llm_name": "llm", "tool_names": ["add"], "system_prompt": SYSTEM}
config = {"llms": llms, "functions": {"add": {"_type": "add"}}, "workflow": agent}
Path("workflow.yml").write_text(json.dumps(config))


async def main() -> None:
    messages = []
    async with load_workflow("workflow.yml") as workflow:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            async with workflow.run(ChatRequest(messages=messages)) as runner:
                said = await runner.result(to_type=str)
            messages.append({"role": "assistant", "content": said})
    print(said)


asyncio.run(main())
