"""An agent for SageMaker's job runtime, as a plain HTTP server: it knows nothing of this project.

It answers its invoke only when it has finished, and reports as `sagemaker.train.rft` does.
"""

import json
import os
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Http:
    """Calls the endpoint of the payload, as `sagemaker.train.rft` does."""

    def __init__(self, metadata):
        self.metadata = metadata

    def post(self, path, body):
        headers = {
            "Content-Type": "application/json",
            "Authorization": "Bearer sagemaker-api-key-anything",
            "X-Amzn-SageMaker-Job-Arn": self.metadata["jobArn"],
            "X-Amzn-SageMaker-Trajectory-Id": self.metadata["rolloutId"],
        }
        request = urllib.request.Request(self.metadata["endpoint"] + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)

    def sample(self, body):
        return self.post("/v1/chat/completions", body)["choices"][0]["message"]

    def complete_rollout(self, **fields):
        self.post("/complete-rollout", {"TrajectoryId": self.metadata["rolloutId"], **fields})

    def update_reward(self, **fields):
        self.post("/update-reward", {"TrajectoryId": self.metadata["rolloutId"], **fields})


class Boto3:
    """Calls the endpoint of its environment with botocore's client."""

    def __init__(self, metadata):
        import boto3

        self.client = boto3.client("sagemakerjobruntime", region_name="us-east-1")
        self.place = {"JobArn": metadata["jobArn"], "TrajectoryId": metadata["rolloutId"]}

    def sample(self, body):
        reply = self.client.sample_with_response_stream(**self.place, Body=json.dumps(body).encode())
        lines = [line[6:] for line in reply["Body"].read().decode().splitlines() if line.startswith("data: ")]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
        return {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}

    def complete_rollout(self, **fields):
        self.client.complete_rollout(**self.place, **fields)

    def update_reward(self, **fields):
        self.client.update_reward(**self.place, **fields)


def work(payload):
    service = (Boto3 if payload.get("boto3") else Http)(payload["metadata"])
    messages = [{"role": "user", "content": payload["prompt"]}]
    for _ in range(payload.get("turns", 1)):
        messages.append(service.sample({"model": "default", "messages": messages}))
        messages.append({"role": "user", "content": "Again."})
    if "fail" in payload:
        service.complete_rollout(Status="failed")
        service.update_reward(Rewards=[0.0])
        raise ValueError(payload["fail"])
    service.complete_rollout(Status="ready")
    if "rewards" in payload:
        service.update_reward(Rewards=payload["rewards"])
    if "error_after" in payload:
        raise ValueError(payload["error_after"])
    return {"status": "success"}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, {"status": "Healthy"})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            self.answer(200, work(json.loads(body)))
        except Exception as error:
            self.answer(500, {"error": str(error)})

    def answer(self, status, fields):
        body = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("0.0.0.0", int(os.environ.get("PORT", "8080"))), Handler).serve_forever()
