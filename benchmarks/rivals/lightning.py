"""Run a step with Agent Lightning, in its environment, as its quick start does with the local controller.

The trainer's process uses the rollout manager of its verl trainer, with that trainer's rule: a rollout without a
reward, failed or not, is trained with `reward_fillna_value`, which is 0. An engine of a few lines answers the calls
that its gateway forwards. Its server and its controller are other processes and outlive the trainer. The controller
starts a process for each rollout, whose agent calls the model and posts its reward as `examples/gsm8k` does.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from agentlightning.verl.agl_rollout_manager import AglRolloutManager
from harness import Died, Work, ended, failing_agents, hand_over, main, tokens_of

KEY, MODEL, FILLED_IN = "fault-bench", "scripted", 0.0


class Engine(BaseHTTPRequestHandler):
    """Answers a chat completion like vLLM, with the token ids that the message names."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps(completion(json.loads(body["messages"][-1]["content"]))).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


def completion(token_ids: list[int]) -> dict[str, Any]:
    logprobs = {"content": [{"token": "", "logprob": -0.5} for _ in token_ids]}
    message = {"role": "assistant", "content": ""}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": token_ids, "logprobs": logprobs}
    return {"object": "chat.completion", "model": MODEL, "prompt_token_ids": [1], "choices": [choice]}


async def step_with_faults(work: Work) -> None:
    engine = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    manager = AglRolloutManager(
        agl_base_url=work["url"],
        agl_key=KEY,
        model=MODEL,
        step=0,
        train_rollout_n=work["group"],
        rollout_timeout_seconds=work["limit_s"],
        local_agent_class="lightning.Agent",
        local_env_map={"TASK": "input.task"},
    )
    manager.delete_model()
    manager.register_model([f"127.0.0.1:{engine.server_port}"])
    tasks = {"task": [f"t{number}" for number in range(work["groups"])]}
    done = manager.enqueue_and_wait_until_completed(tasks, is_train=True)
    for rollout in done:
        reward = FILLED_IN if rollout.final_reward is None else rollout.final_reward
        for triplet in rollout.triplets:
            hand_over(rollout.input["task"], reward, triplet.response["token_ids"])
    ended(Counter(rollout.error_message for rollout in done if rollout.rollout_state == "failed"))


async def run_agents(work: Work) -> None:
    """Run its server and its controller until SIGTERM. The controller then kills the agents."""
    stopped, here, scripts = asyncio.Event(), Path(__file__).parent, Path(sys.executable).parent
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    env = {**os.environ, "PYTHONPATH": str(here)}
    hydra = [f"hydra.run.dir={work['folder']}/hydra", "hydra.output_subdir=null"]
    address = ["host=127.0.0.1", f"port={work['port']}", f"key={KEY}", f"default_proxy.model_name={MODEL}"]
    whose = ["runner_type=local", f"agl_server.url={work['url']}", f"agl_server.key={KEY}"]
    commands = {"agl-server": address, "agl-controller": whose}
    children = [subprocess.Popen([scripts / name, *said, *hydra], env=env) for name, said in commands.items()]
    await stopped.wait()
    for child in reversed(children):
        child.terminate()
        child.wait()


class Agent:
    """An agent, which the controller imports in the process of its rollout."""

    async def run(self) -> None:
        work = json.loads(os.environ["FAULT_BENCH"])
        agent = failing_agents(work).make(os.environ["TASK"])
        self._http = httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=10)
        if agent.fault == "forged_tokens":
            forged = {"response": completion(tokens_of(0)), "http_status": 200, "status": "ok"}
            await self._post(os.environ["AGL_EVENT_URL"], "model_request", forged)
        else:
            await self._call_model(tokens_of(agent.proof))
        if agent.fault == "foreign_container":
            await self._end_another(agent.group)
        try:
            reward = await agent.run()
        except Died:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(2 if work["fault"] == "published_twice" else 1):
            await self._post(os.environ["AGL_EVENT_URL"], "reward", {"value": reward})

    async def _call_model(self, token_ids: list[int]) -> None:
        """Call the model with the retries of the OpenAI client and `max_retries=6`."""
        body = {"model": "auto", "messages": [{"role": "user", "content": json.dumps(token_ids)}]}
        for nth in range(7):
            try:
                reply = await self._http.post(f"{os.environ['AGL_OPENAI_BASE_URL']}/chat/completions", json=body)
                reply.raise_for_status()
            except httpx.HTTPError:
                if nth == 6:
                    raise
                await asyncio.sleep(min(0.5 * 2**nth, 8.0))
            else:
                return

    async def _post(self, url: str, kind: str, data: dict[str, Any]) -> None:
        (await self._http.post(url, json={"event_type": kind, "data": data})).raise_for_status()

    async def _end_another(self, task: str) -> None:
        """Post a reward for another rollout of the group that has called the model, and end it."""
        mine = os.environ["AGL_EVENT_URL"]
        api, _, own = mine.partition("/attempt/")[0].rpartition("/")
        for _ in range(100):
            for other in (await self._http.get(api, params={"state_in": "running"})).json():
                whose = other["rollout_id"]
                if whose == own or other["input"]["task"] != task:
                    continue
                if (await self._http.get(f"{api}/{whose}/events")).json():
                    await self._post(mine.replace(own, whose), "reward", {"value": 7.0})
                    await self._http.patch(f"{api}/{whose}", json={"status": {"state": "succeeded"}})
                    return
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    main(step_with_faults, run_agents)
