"""Agents that agentcore-rl-toolkit 0.2.0 wraps. Their results are JSON, in S3 or in the answer to a status call."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

from emulated_aws.agentcore import AgentCore
from emulated_aws.ready_made import ReadyMadeResults

_ENVELOPE = "_agentcore_runtime"
_VERSION = 1


class ToolkitAgents(AgentCore):
    """Sessions whose results have as many bytes as those of `AgentCore`."""

    def __init__(self, s3: Any, sqs: Any, results: ReadyMadeResults, options: Any, calls: Any) -> None:
        super().__init__(s3, sqs, results, options, calls)
        ids = SimpleNamespace(run_id="r", step=0, task_id="t", rollout_id="t.0", attempt=1, session_id="s" * 36)
        size = sum(map(len, results.make(ids, time.time())))  # type: ignore[arg-type]
        self._result = {"rewards": [1.0], "status_code": 200, "stop_reason": "end_turn", "messages": "x" * size}
        self._encoded = json.dumps(self._result).encode()
        self._finished: set[str] = set()

    def invoke(self, session_id: str, payload: Any) -> Any:
        return (self._accept_call if _ENVELOPE in payload else self._accept)(session_id, payload)

    def _accept(self, session_id: str, fields: dict[str, Any]) -> dict[str, Any]:
        asked = fields["_rollout"]
        key = f"{asked['exp_id']}/{asked['input_id']}/{session_id}.json"
        self._begin(session_id, lambda: self._store(asked["s3_bucket"], key, asked["input_id"]))
        return {"status": "processing", "s3_bucket": asked["s3_bucket"], "result_key": key}

    def _accept_call(self, session_id: str, fields: dict[str, Any]) -> dict[str, Any]:
        name = fields[_ENVELOPE]["invocation_id"]
        state = {"version": _VERSION, "invocation_id": name}
        if name in self._finished:
            return {**state, "status": "completed", "result": self._result}
        if fields[_ENVELOPE]["operation"] == "start":
            self._begin(session_id, lambda: self._finish(name))
        return {**state, "status": "in_progress"}

    def _store(self, bucket: str, key: str, name: str) -> None:
        self._s3.put(bucket, key, self._encoded, b"")
        self.published[name] = time.monotonic()

    def _finish(self, name: str) -> None:
        self._finished.add(name)
        self.published[name] = time.monotonic()

    def reset(self) -> None:
        super().reset()
        self._finished.clear()
