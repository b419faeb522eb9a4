from common import API_KEY, BASE_URL, MODEL, QUESTIONS, add
from openhands.sdk import LLM, Action, Agent, Conversation, Observation, Tool, ToolDefinition, register_tool
from openhands.sdk.tool import ToolExecutor


class AddAction(Action):
    a: int
    b: int


class Sum(Observation):
    pass


class AddExecutor(ToolExecutor):
    def __call__(self, action, conversation=None):
        return Sum.from_text(str(add(action.a, action.b)))


class AddTool(ToolDefinition):
    @classmethod
    def create(cls, conv_state=None, **params):
        run = AddExecutor()
        return [cls(description=add.__doc__, action_type=AddAction, observation_type=Sum, executor=run)]


register_tool("AddTool", AddTool)
# connect
llm = LLM(model=f"openai/{MODEL}", base_url=BASE_URL, api_key=API_KEY)
# connected
conversation = Conversation(Agent(llm=llm, tools=[Tool(name="AddTool")]), workspace=".")
for question in QUESTIONS:
    conversation.send_message(question)
    conversation.run()
print(conversation.state.events[-1])
