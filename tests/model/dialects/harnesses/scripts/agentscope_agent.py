import asyncio

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel, OpenAIResponseModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit
from common import API, API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add

# connect
kind = OpenAIResponseModel if API == "responses" else OpenAIChatModel
model = kind(OpenAICredential(base_url=BASE_URL, api_key=API_KEY), MODEL)
# connected


async def main() -> None:
    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="A sum.")
    agent = Agent("adder", SYSTEM, model, Toolkit([FunctionTool(add, permission=allowed)]))
    for question in QUESTIONS:
        said = await agent.reply(UserMsg("user", question))
    print(said.get_text_content())


asyncio.run(main())
