import asyncio
import subprocess
from pathlib import Path
from tempfile import mkdtemp

from common import API_KEY, BASE_URL, MODEL, QUESTIONS
from harbor.agents.terminus_2 import Terminus2
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.models.agent.context import AgentContext
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

# connect
model = {"model_name": f"openai/{MODEL}", "api_base": BASE_URL, "llm_kwargs": {"api_key": API_KEY}}
agent = Terminus2(logs_dir=Path("logs"), record_terminal_session=False, **model)
# connected


class ThisMachine(BaseEnvironment):
    """Harbor's environments are containers. In a rollout, the agent is in its container already."""

    @staticmethod
    def type() -> str:
        return "this-machine"

    def _validate_definition(self) -> None: ...

    async def start(self, force_build: bool) -> None: ...

    async def stop(self, delete: bool) -> None:
        await self.exec("tmux kill-server")

    upload_file = upload_dir = download_file = download_dir = None

    async def exec(self, command: str, cwd=None, env=None, timeout_sec=None, user=None) -> ExecResult:
        argv = ["bash", "-c", f"export TMUX_TMPDIR={self.environment_dir}; {command}"]
        done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, check=False)
        return ExecResult(stdout=done.stdout, stderr=done.stderr, return_code=done.returncode)


async def main() -> None:
    folder = Path(mkdtemp())
    environment = ThisMachine(folder, "sums", "session", TrialPaths(folder), EnvironmentConfig())
    await agent.setup(environment)
    await agent.run(" ".join(QUESTIONS), environment, AgentContext())
    print((await environment.exec("tmux capture-pane -p -t terminus-2")).stdout)
    await environment.stop(delete=True)


asyncio.run(main())
