"""Agent frameworks with a tool, as their users write them: strands-agents and pydantic-ai."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import pydantic_ai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, ToolCallPart, ToolReturnPart, UserPromptPart
from pydantic_ai.models.anthropic import AnthropicModel as PydanticAnthropic
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel as StrandsAnthropic
from strands.models.openai import OpenAIModel
from strands.types.exceptions import ContextWindowOverflowException, MaxTokensReachedException

from rollout_backend.local.scripted import ToolCall

MODEL = "scripted"
SYSTEM = "Work each problem out with the calculator."
QUESTION, MORE = "What is 15 - 43?", "Now take 7 off."
SHOTS = [("What is 2 + 3?", "2 + 3", "5"), ("What is 10 - 4?", "10 - 4", "6"), ("What is 6 * 9?", "6 * 9", "54")]
SCRIPT = [ToolCall("calculator", {"expression": "15 - 43"}), "It is -28.", "-35"]


def evaluate(expression: str) -> str:
    return "-28" if expression == "15 - 43" else "I cannot tell."


# --- strands-agents ---------------------------------------------------------------------------------------


@tool
def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    return evaluate(expression)


@asynccontextmanager
async def strands_agent(api: str, gateway, shots=(), **sampling) -> AsyncIterator[Agent]:
    key = gateway.key(**sampling)
    if api == "anthropic":
        arguments = {"base_url": f"{gateway.url}/v1", "api_key": key, "max_retries": 0}
        model = StrandsAnthropic(client_args=arguments, model_id=MODEL, max_tokens=1000)
    else:
        arguments = {"base_url": f"{gateway.url}/v1", "api_key": key, "max_retries": 0}
        model = OpenAIModel(client_args=arguments, model_id=MODEL)
    messages = []
    for i, (question, expression, result) in enumerate(shots):
        use = {"toolUseId": f"c{i}", "name": "calculator", "input": {"expression": expression}}
        answer = {"toolUseId": f"c{i}", "status": "success", "content": [{"text": result}]}
        messages += [
            {"role": "user", "content": [{"text": question}]},
            {"role": "assistant", "content": [{"toolUse": use}]},
            {"role": "user", "content": [{"toolResult": answer}]},
            {"role": "assistant", "content": [{"text": f"Answer: {result}"}]},
        ]
    yield Agent(
        model=model,
        messages=messages,
        tools=[calculator],
        system_prompt=SYSTEM,
        callback_handler=None,
        retry_strategy=None,
    )
    if api == "anthropic":
        await model.client.close()  # the framework leaves it open


async def run_strands(api: str, gateway, shots=(), **sampling) -> int:
    """Ask two questions; return the number of answered model calls."""
    async with strands_agent(api, gateway, shots, **sampling) as agent:
        with suppress(MaxTokensReachedException):
            for question in (QUESTION, MORE):
                await agent.invoke_async(question, limits={"turns": 3})
    return gateway.stats().calls


# --- pydantic-ai ------------------------------------------------------------------------------------------


def pydantic_model(api: str, gateway, stack: AsyncExitStack, **sampling):
    key = gateway.key(**sampling)
    if api == "anthropic":
        anthropic = AsyncAnthropic(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)
        stack.push_async_exit(anthropic)
        return PydanticAnthropic(MODEL, provider=AnthropicProvider(anthropic_client=anthropic))
    client = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)
    stack.push_async_exit(client)
    kind = OpenAIResponsesModel if api == "responses" else OpenAIChatModel
    return kind(MODEL, provider=OpenAIProvider(openai_client=client))


async def run_pydantic_ai(api: str, gateway, shots=(), stream: bool = False, **sampling) -> int:
    history = []
    for i, (question, expression, result) in enumerate(shots):
        history += [
            ModelRequest([UserPromptPart(question)]),
            ModelResponse([ToolCallPart("calculator", {"expression": expression}, f"c{i}")]),
            ModelRequest([ToolReturnPart("calculator", result, f"c{i}")]),
            ModelResponse([TextPart(f"Answer: {result}")]),
        ]
    async with AsyncExitStack() as stack:
        agent = pydantic_ai.Agent(pydantic_model(api, gateway, stack, **sampling), instructions=SYSTEM)
        agent.tool_plain(evaluate, name="calculator")
        with suppress(pydantic_ai.UnexpectedModelBehavior):  # several unusable replies
            for question in (QUESTION, MORE):
                if stream:
                    async with agent.run_stream(question, message_history=history) as result:
                        await result.get_output()
                else:
                    result = await agent.run(question, message_history=history)
                history = result.all_messages()
    return gateway.stats().calls


# --- on a script ------------------------------------------------------------------------------------------

AGENTS = {
    "strands-chat": partial(run_strands, "chat"),
    "strands-anthropic": partial(run_strands, "anthropic"),
    **{
        f"pydantic-{api}{'-streamed' if stream else ''}": partial(run_pydantic_ai, api, stream=stream)
        for api in ("chat", "responses", "anthropic")
        for stream in (False, True)
    },
}


@pytest.mark.parametrize("run", AGENTS.values(), ids=AGENTS)
async def test_a_conversation_with_a_tool_is_one_row(play, bundle, run):
    gateway = play(SCRIPT)
    assert await run(gateway) == len(SCRIPT)
    prompts = [request["input_ids"] for request in gateway.engine.requests]
    (segment,) = gateway.trajectory().segments
    assert [segment.token_ids.tolist()[: turn.start] for turn in segment.turns] == prompts
    assert "<tool_response>\n-28\n</tool_response>" in bundle.decode(segment.token_ids)


async def test_each_framework_reports_a_full_context_in_its_own_way(play, byte_model):
    gateway = play(SCRIPT, model=byte_model.model_copy(update={"context_length": 64}))
    for api in ("chat", "anthropic"):
        async with strands_agent(api, gateway) as agent:
            with pytest.raises(ContextWindowOverflowException):
                await agent.invoke_async(QUESTION)
        async with AsyncExitStack() as stack:
            agent = pydantic_ai.Agent(pydantic_model(api, gateway, stack))
            with pytest.raises(pydantic_ai.ModelHTTPError) as refused:
                await agent.run(QUESTION * 5)
        assert refused.value.status_code == 400


# --- on the real engine -----------------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, id=name, marks=() if name == "pydantic-anthropic-streamed" else pytest.mark.release)
        for name, run in AGENTS.items()
    ],
)
async def test_what_the_real_engine_sampled_is_recorded(gateway, recorded, witness, run):
    calls = await run(gateway, SHOTS, max_tokens=24, seed=1)
    assert calls == len(witness.sampled) >= 1
    segments = (await asyncio.to_thread(recorded)).segments
    # pydantic-ai drops an empty reply from the history, so what follows is another row.
    for segment in segments[:-1]:
        assert not (segment.messages[-1]["content"] or "").strip()
