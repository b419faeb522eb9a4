import json

import litellm
from common import API, API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add

# connect
provider = "anthropic" if API == "messages" else "openai"
endpoint = {"model": f"{provider}/{MODEL}", "api_base": BASE_URL, "api_key": API_KEY}
# connected

numbers = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}}
tools = [{"type": "function", "function": {"name": "add", "description": add.__doc__, "parameters": numbers}}]
messages = [{"role": "system", "content": SYSTEM}]
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    while messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
        message = litellm.completion(**endpoint, messages=messages, tools=tools).choices[0].message
        messages.append(message.model_dump())
        for call in message.tool_calls or ():
            result = add(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
print(messages[-1]["content"])
