import litellm.litellm_core_utils.default_encoding  # noqa: F401  it sets TIKTOKEN_CACHE_DIR
from common import API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM
from common import add as plus
from langroid import ChatAgent, ChatAgentConfig, ToolMessage
from langroid.language_models import OpenAIGPTConfig

# connect
config = ChatAgentConfig(
    llm=OpenAIGPTConfig(chat_model=MODEL, api_base=BASE_URL, api_key=API_KEY, chat_context_length=32_000),
    system_message=SYSTEM,
    use_tools=False,
    use_functions_api=True,
)
# connected


class Add(ToolMessage):
    request: str = "add"
    purpose: str = "Adds two numbers."
    a: int
    b: int

    def handle(self):
        return str(plus(self.a, self.b))


agent = ChatAgent(config)
agent.enable_message(Add)
for question in QUESTIONS:
    said = agent.llm_response(question)
    while (result := agent.agent_response(said)) is not None:
        said = agent.llm_response(result)
print(said.content)
