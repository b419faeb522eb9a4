"""Run as a script: an agent whose body comes with its payload."""

import sys
import textwrap
import time
from typing import Any

from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()


def pass_time(seconds: float) -> None:
    """Put the clock of this process forward, and with it the timers of its event loop."""
    clock = time.monotonic
    time.monotonic = lambda: clock() + seconds
    for task in app._tasks:
        task.get_loop().call_soon_threadsafe(lambda: None)  # so that it looks at the clock


def set_clock(seconds: float) -> None:
    """Set the wall clock of this process forward or back, as it is set after the restore of a snapshot."""
    clock = time.time
    time.time = lambda: clock() + seconds


def make_body(kind: str, context: RolloutContext) -> Any:
    scope: dict[str, Any] = {"pass_time": pass_time, "set_clock": set_clock}
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
