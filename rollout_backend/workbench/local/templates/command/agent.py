"""Run a command as the agent, and score what it prints. The program can be written in any language."""

import re
import sys
from pathlib import Path

from agent_wrapper import RolloutApp, RolloutContext, run_command

app = RolloutApp()

FOLDER = Path(__file__).parent
COMMAND = [sys.executable, "solver.py"]  # any program that the Dockerfile installs


def score(reply: str, answer: str) -> float:
    """Return 1 if the last integer of the reply is the answer, else 0."""
    numbers = re.findall(r"-?\d+", reply)
    return float(numbers[-1:] == [answer])


@app.entrypoint
async def agent(context: RolloutContext) -> dict[str, object]:
    reply = await run_command(context, COMMAND, input=context.payload["question"], cwd=FOLDER)
    return {"reward": score(reply, context.payload["answer"]), "reply": reply}


if __name__ == "__main__":
    app.run()
