"""What goes into the agent's image: the wrapper round your agent's function.

from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()

@app.entrypoint
async def agent(context: RolloutContext) -> float: ...

if __name__ == "__main__":
    app.run()
"""

from agent_wrapper.app import RolloutApp
from agent_wrapper.context import RolloutContext
from agent_wrapper.errors import AgentFailure

__all__ = ["AgentFailure", "RolloutApp", "RolloutContext"]
