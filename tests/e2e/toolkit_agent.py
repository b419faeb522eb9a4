"""An agent as users of agentcore-rl-toolkit write it: it knows nothing of this project."""

import asyncio
import json
import os
import urllib.request

from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()


def ask(config, question):
    body = {"model": config["model_id"], "messages": [{"role": "user", "content": question}]}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {config.get('api_key') or 'EMPTY'}"}
    request = urllib.request.Request(f"{config['base_url']}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


@app.rollout_entrypoint
async def invoke_agent(payload: dict):
    config = {**payload["_rollout"]}
    if payload.get("release") == "0.2.0":  # its examples send a fixed key
        del config["api_key"]
    answer = await asyncio.to_thread(ask, config, payload["question"])
    if "fail" in payload:
        raise ValueError(payload["fail"])
    return {"rewards": [float(payload["answer"] in answer)], "reply": answer, "rollout_data": [{"token_ids": [1, 2]}]}


if __name__ == "__main__":
    app.run(port=int(os.environ.get("PORT", "8080")))  # the emulator runs its sessions on one machine
