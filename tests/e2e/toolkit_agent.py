"""An agent as users of agentcore-rl-toolkit write it, in either of its apps: it knows nothing of this project."""

import asyncio
import json
import os
import sys
import urllib.request

from agentcore_rl_toolkit import AgentCoreRLApp, AgentCoreRuntimeApp

rl_app, runtime_app = AgentCoreRLApp(), AgentCoreRuntimeApp()


def ask(config, question):
    body = {"model": config["model_id"], "messages": [{"role": "user", "content": question}]}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {config.get('api_key') or 'EMPTY'}"}
    request = urllib.request.Request(f"{config['base_url']}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


async def work(config, payload):
    answer = await asyncio.to_thread(ask, config, payload["question"])
    if "die" in payload:
        os._exit(1)
    if "fail" in payload:
        raise ValueError(payload["fail"])
    return answer, float(payload["answer"] in answer)


@rl_app.rollout_entrypoint
async def roll_out(payload: dict):
    config = {**payload["_rollout"]}
    if payload.get("release") == "0.2.0":  # its examples send a fixed key
        del config["api_key"]
    answer, reward = await work(config, payload)
    return {"rewards": [reward], "reply": answer, "rollout_data": [{"token_ids": [1, 2]}]}


@runtime_app.entrypoint
async def invoke_agent(payload: dict):
    answer, reward = await work(payload["_config"], payload)
    return {"reward": reward, "reply": answer}


if __name__ == "__main__":
    app = runtime_app if "runtime" in sys.argv else rl_app
    app.run(port=int(os.environ.get("PORT", "8080")))  # the emulator runs its sessions on one machine
