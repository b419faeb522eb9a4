from common import API, API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM
from common import add as plus
from mirascope import llm

# connect
provider, scope = {
    "chat": ("openai:completions", "openai"),
    "responses": ("openai:responses", "openai"),
    "messages": ("anthropic", "anthropic"),
}[API]
llm.register_provider(provider, f"{scope}/", base_url=BASE_URL, api_key=API_KEY)
model = llm.model(f"{scope}/{MODEL}")
# connected


@llm.tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return plus(a, b)


messages = [llm.messages.system(SYSTEM)]
for question in QUESTIONS:
    messages.append(llm.messages.user(question))
    reply = model.call(messages, tools=[add])
    while reply.tool_calls:
        reply = reply.resume(reply.execute_tools())
    messages = reply.messages
print(reply.text())
