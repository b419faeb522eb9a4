import asyncio

from claude_agent_sdk import AssistantMessage, ClaudeAgentOptions, ClaudeSDKClient, create_sdk_mcp_server, tool
from common import API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM


@tool("add", "Adds two numbers.", {"a": int, "b": int})
async def add(given: dict[str, int]) -> dict[str, object]:
    return {"content": [{"type": "text", "text": str(given["a"] + given["b"])}]}


# connect
environment = {
    "ANTHROPIC_BASE_URL": BASE_URL,
    "ANTHROPIC_API_KEY": API_KEY,
    "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "ENABLE_TOOL_SEARCH": "false",
}
options = ClaudeAgentOptions(model=MODEL, env=environment)
# connected
options.system_prompt, options.tools, options.allowed_tools = SYSTEM, [], ["mcp__sums__add"]
options.mcp_servers = {"sums": create_sdk_mcp_server("sums", tools=[add])}


async def main() -> None:
    async with ClaudeSDKClient(options) as client:
        for question in QUESTIONS:
            await client.query(question)
            async for message in client.receive_response():
                if isinstance(message, AssistantMessage):
                    print(message.content)


asyncio.run(main())
