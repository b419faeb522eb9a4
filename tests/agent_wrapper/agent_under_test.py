"""Run as a script: an agent whose body comes with its payload."""

import sys
import textwrap
from typing import Any

from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()


def make_body(kind: str, context: RolloutContext) -> Any:
    scope: dict[str, Any] = {}
    source = f"{kind} body(context):\n" + textwrap.indent(context.payload["body"], "    ")
    exec("import asyncio, os, sys, time\nfrom agent_wrapper import AgentFailure\n" + source, scope)
    return scope["body"]


def sync_agent(context: RolloutContext) -> Any:
    return make_body("def", context)(context)


async def async_agent(context: RolloutContext) -> Any:
    return await make_body("async def", context)(context)


if __name__ == "__main__":
    app.entrypoint({"sync": sync_agent, "async": async_agent}[sys.argv[1]])
    app.run()
