"""Real clients at the real gateway, before a real engine, and a witness between the last two of what was sampled.

The model is small: it seldom calls a tool and says odd things. What it says is not tested. What is: each call ends in
a well-formed answer or in an error that the client has a class for, and what is recorded is what was sampled.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agent_wrapper.contract import Trajectory
from rollout_backend.rendering.renderer import RendererBundle, load_renderer
from rollout_backend.serving.server_process import free_port


@dataclass
class Sampled:
    """One answer of the engine."""

    prompt: list[int]
    constrained: bool
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False

    def add(self, reply: dict[str, Any]) -> None:
        """A whole answer, or a piece of a stream with what is new in it."""
        self.ids += reply["output_ids"]
        self.logprobs += [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        self.finished = reply["meta_info"]["finish_reason"] is not None


class Witness:
    """Passes `/generate` on to the engine, and remembers all that it answered."""

    def __init__(self, engine_url: str) -> None:
        self._calls: list[Sampled] = []
        self._engine_url = engine_url
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        app = Starlette(routes=[Route("/generate", self._generate, methods=["POST"])])
        self._server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.005)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    @property
    def sampled(self) -> list[Sampled]:
        return [call for call in self._calls if call.finished]

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        params = body["sampling_params"]
        call = Sampled(body["input_ids"], "structural_tag" in params or "json_schema" in params)
        self._calls.append(call)
        if body.get("stream"):
            return StreamingResponse(self._stream(body, call), media_type="text/event-stream")
        async with httpx.AsyncClient(timeout=300) as http:
            answer = await http.post(f"{self._engine_url}/generate", json=body)
        if answer.status_code == 200:
            call.add(answer.json())
        return Response(answer.content, answer.status_code, media_type="application/json")

    async def _stream(self, body: dict[str, Any], call: Sampled) -> AsyncIterator[bytes]:
        async with (
            httpx.AsyncClient(timeout=300) as http,
            http.stream("POST", f"{self._engine_url}/generate", json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    call.add(json.loads(line.removeprefix("data: ")))
                yield f"{line}\n".encode()


@pytest.fixture(scope="session")
def real_bundle(real_model) -> RendererBundle:
    return load_renderer(real_model)


@pytest.fixture
def witness(real_engine) -> Iterator[Witness]:
    witness = Witness(real_engine)
    yield witness
    witness.stop()


@pytest.fixture
def gateway(serve, witness, real_model, real_bundle):
    return serve(witness.url, model=real_model, bundle=real_bundle, model_call_s=150)


@pytest.fixture
def recorded(gateway, witness) -> Callable[[], Trajectory]:
    """Seals the session and checks that it holds exactly what the engine sampled, each token once."""

    def check(session: str = "s1") -> Trajectory:
        trajectory = gateway.trajectory(session)
        turns = {}
        for segment in trajectory.segments:
            ids, logprobs, mask = (
                getattr(segment, name).tolist() for name in ("token_ids", "logprobs", "response_mask")
            )
            at = 0
            for turn in segment.turns:
                assert mask[at : turn.end] == [0] * (turn.start - at) + [1] * (turn.end - turn.start)
                assert all(map(math.isnan, logprobs[at : turn.start]))
                assert turn.weight_versions[0].start == turn.start
                assert turn.weight_versions[-1].end == turn.end
                turns[tuple(ids[: turn.start]), tuple(ids[turn.start : turn.end])] = logprobs[turn.start : turn.end]
                at = turn.end
            assert at == len(ids)
        assert turns.keys() == {(tuple(call.prompt), tuple(call.ids)) for call in witness.sampled}
        for call in witness.sampled:
            logprobs = turns[tuple(call.prompt), tuple(call.ids)]
            if call.constrained:
                assert all(map(math.isnan, logprobs))
            else:
                assert logprobs == pytest.approx(call.logprobs, abs=1e-6)
        assert sum(sum(segment.response_mask) for segment in trajectory.segments) == sum(
            len(call.ids) for call in witness.sampled
        )
        return trajectory

    return check
