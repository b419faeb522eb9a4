"""Collect rollouts with no more than what AWS and a run's promises demand. The argument is the work, as JSON.

Each call is signed. Each session has a key for the gateway, and is on record before its invoke, when its agent has
accepted, before its stop and after it. Each result is decoded, its seal is verified, and it is stored. The functions
are this package's, called one after another: nothing is retried, paced, counted or reported, and no fault is handled.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from botocore.credentials import Credentials
from collect_by_bare_http import Reference, main
from multidict import CIMultiDict

from agent_wrapper.contract import REQUEST_FIELD, ResultTarget, Rollout, RolloutRequest, Sampling
from rollout_backend.atomic_file import write_file
from rollout_backend.aws.repeated_call import Request, authorize
from rollout_backend.core.seal import Sealer
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.serving.run_secret import model_endpoint
from rollout_backend.step.in_flight import InFlightAttempt, InFlightLog, StepFiles

RUN, STEP, WORK_S = "checked", 0, 3600.0
GATEWAY = "http://127.0.0.1:9"  # for the agents, which call no model here
MAX_BYTES = 2**30


class CheckedReference(Reference):
    def __init__(self, work: dict[str, Any], folder: Path) -> None:
        super().__init__(work)
        self._origin, self._secret, self._folder = work["url"], work["secret"], folder
        self._host_name = urlsplit(work["url"]).netloc
        self._sealer, self._sessions = Sealer(self._secret), InFlightLog(StepFiles(folder / "sessions"))
        self._credentials = Credentials("test", "test")

    def sign(self, service: str, method: str, path: str, headers: dict[str, str], body: bytes) -> dict[str, str]:
        signed: CIMultiDict[str] = CIMultiDict({"Host": self._host_name, **headers})
        request = Request(method, self._origin + path, signed, body, {})
        authorize(request, self._credentials, "s3v4" if service == "s3" else "v4", service, "us-east-1")
        return {name: value for name, value in request.headers.items() if name != "Host"}

    def payload(self, rollout_id: str) -> bytes:
        session, deadline = f"{rollout_id:>40}", time.time() + WORK_S
        claims = SessionClaims(
            run_id=RUN,
            step=STEP,
            rollout_id=rollout_id,
            attempt=1,
            session_id=session,
            sampling=Sampling(),
            expires_at=deadline,
        )
        request = RolloutRequest(
            run_id=RUN,
            step=STEP,
            task_id=rollout_id[:-2],
            rollout_id=rollout_id,
            attempt=1,
            session_id=session,
            endpoint=model_endpoint(GATEWAY, "scripted", self._secret, claims),
            sampling=claims.sampling,
            deadline=deadline,
            result=ResultTarget(bucket="results", queue_url=self._queue),
        )
        return json.dumps({REQUEST_FIELD: request.model_dump(mode="json")}).encode()

    async def invoke(self, rollout_id: str) -> None:
        session, now = f"{rollout_id:>40}", time.time()
        self._sessions.record_invoked(STEP, session)
        await super().invoke(rollout_id)
        accepted = InFlightAttempt(
            session_id=session, rollout_id=rollout_id, attempt=1, began=now, deadline=now + WORK_S
        )
        self._sessions.record_running(STEP, accepted)

    def accept(self, rollout_id: str, result: bytes) -> None:
        rollout = Rollout.decode(result, MAX_BYTES)
        self._sealer.check(rollout)
        write_file(self._folder / "rollouts" / rollout_id, result)

    async def stop(self, rollout_id: str) -> None:
        self._sessions.record_closed(STEP, f"{rollout_id:>40}")
        await super().stop(rollout_id)
        self._sessions.record_stopped(STEP, f"{rollout_id:>40}")


if __name__ == "__main__":
    work = json.loads(sys.argv[1])
    asyncio.run(main(CheckedReference(work, Path(work["folder"])), work))
