"""An agent in `AgentCoreRuntimeApp` as its users write it: it knows nothing of this project."""

import asyncio
import json
import os
import urllib.request

from agentcore_rl_toolkit import AgentCoreRuntimeApp

app = AgentCoreRuntimeApp()


def ask(config, question):
    body = {"model": config["model_id"], "messages": [{"role": "user", "content": question}]}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {config['api_key']}"}
    request = urllib.request.Request(f"{config['base_url']}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


@app.entrypoint
async def invoke_agent(payload: dict):
    answer = await asyncio.to_thread(ask, payload["_config"], payload["question"])
    if "die" in payload:
        os._exit(1)
    if "fail" in payload:
        raise ValueError(payload["fail"])
    return {"reward": float(payload["answer"] in answer), "reply": answer}


if __name__ == "__main__":
    app.run(port=int(os.environ.get("PORT", "8080")))  # the emulator runs its sessions on one machine
