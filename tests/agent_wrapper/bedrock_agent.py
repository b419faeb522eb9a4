"""Run as a script: an agent as users of the bedrock-agentcore SDK write it. $ROLLOUTS: its import line is changed."""

import asyncio
import functools
import os
import threading
import time
from fractions import Fraction

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

if os.environ.get("ROLLOUTS"):
    from agent_wrapper import RolloutContext
    from agent_wrapper.bedrock_agentcore import BedrockAgentCoreApp
else:
    from bedrock_agentcore import BedrockAgentCoreApp
from bedrock_agentcore.runtime import BedrockAgentCoreContext, PingStatus

app = BedrockAgentCoreApp(debug=True)
if os.environ.get("CLIENTS"):  # made before any invoke
    import anthropic
    import openai
    from strands import Agent, tool
    from strands.models import BedrockModel

    OPENAI = openai.OpenAI(max_retries=0)
    ANTHROPIC = anthropic.AsyncAnthropic(max_retries=0)

    @tool
    def add(a: int, b: int) -> int:
        """Add two integers."""
        return a + b

    STRANDS = Agent(BedrockModel(max_tokens=77, stop_sequences=["END"]), tools=[add], callback_handler=None)
MESSAGES = [{"role": "user", "content": "Hi"}]
tasks = []


def ask():
    return OPENAI.chat.completions.create(model="gpt-5", messages=MESSAGES).choices[0].message.content


def in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))  # without the context of its starter
    thread.start()
    thread.join()
    return found[0]


@functools.cache
def kept_client():
    return openai.OpenAI(**RolloutContext.current().openai_kwargs())


def ask_kept():
    return kept_client().chat.completions.create(model="the-model", messages=MESSAGES).choices[0].message.content


async def ask_anthropic():
    reply = await ANTHROPIC.messages.create(model="claude", max_tokens=9, messages=MESSAGES)
    return reply.content[0].text


@app.async_task
async def work(payload):
    await asyncio.to_thread(wait, payload)
    ask()


def wait(payload):
    with open(payload["started"], "w") as pipe:
        pipe.write("!")
    while not os.path.exists(payload.get("go", "/never")):
        time.sleep(0.01)


def work_in_thread(payload, task_id):
    wait(payload)
    ask()
    app.complete_async_task(task_id)


def act(payload, context):
    """Do what the payload says, and return what an entrypoint would."""
    match payload.get("do") if isinstance(payload, dict) else None:
        case "fail":
            raise ValueError("no such tool: ü")
        case "refuse":
            raise HTTPException(422, "no prompt")
        case "respond":
            return JSONResponse({"error": "not found"}, 404, {"X-Mine": "1"})
        case "return":
            return payload["value"]
        case "object":
            return {"made": {1, 2}, "other": object, "score": Fraction(1, 2)}
        case "begin":
            tasks.append(app.add_async_task("job", {"n": 1}))
            return app.get_current_ping_status().value
        case "complete":
            return app.complete_async_task(tasks.pop() if tasks else 0)
        case "background":
            task_id = app.add_async_task("job")
            threading.Thread(target=work_in_thread, args=(payload, task_id)).start()
            return {"status": "processing"}
        case "ask":
            replies = [ask() for _ in range(payload.get("times", 1))]
            return {"reward": 0.5, "replies": replies}
        case "thread":
            return {"reward": 0.5, "replies": [in_thread(ask)]}
        case "kept":
            return {"reward": 0.5, "replies": [ask_kept()]}
        case "strands":
            return {"result": STRANDS("Hi").message}
        case "context" | "thread_context" as place:
            current = RolloutContext.current() if place == "context" else in_thread(RolloutContext.current)
            current.artifacts.add("log.txt", "done")
            return {"training": current.training, "model": current.model}
        case "execute":
            scope = {}
            exec(payload["source"], scope)
            return {"reward": 1, **scope["found"]}
        case "wait":
            wait(payload)
    headers = {name: value for name, value in (context.request_headers or {}).items() if name.startswith("x-")}
    return {
        "payload": payload,
        "session": [context.session_id, BedrockAgentCoreContext.get_session_id()],
        "token": BedrockAgentCoreContext.get_workload_access_token(),
        "headers": headers,
    }


def sync_agent(payload, context):
    return act(payload, context)


async def async_agent(payload, context):
    match payload.get("do") if isinstance(payload, dict) else None:
        case "anthropic":
            return {"reward": 0.5, "replies": [await ask_anthropic()]}
        case "background":
            tasks.append(asyncio.create_task(work(payload)))
            return {"status": "processing"}
        case "wait":
            await asyncio.to_thread(wait, payload)
    return act(payload, context)


def sync_generator(payload, context):
    yield "ü"
    yield {"n": 1}
    yield act(payload, context)


async def async_generator(payload, context):
    yield "ü"
    yield {"n": 1}
    yield act(payload, context)


def payload_only(payload):
    return {"given": payload}


async def partial_agent(extra, payload):
    return {"given": payload, "extra": extra}


async def use(request):
    app.entrypoint(ENTRYPOINTS[request.path_params["name"]])
    return JSONResponse({})


FUNCTIONS = (sync_agent, async_agent, sync_generator, async_generator, payload_only)
ENTRYPOINTS = {each.__name__: each for each in FUNCTIONS} | {"partial": functools.partial(partial_agent, 7)}
app.entrypoint(sync_agent)
app.add_route("/use/{name}", use)
if "IDLE" in os.environ:
    app.ping(lambda: PingStatus.HEALTHY)

if __name__ == "__main__":
    app.run(int(os.environ["PORT"]), "127.0.0.1")
