"""Run vLLM's HTTP server with the middleware, and load adapters into its engine as verl does.

vLLM's interpreter runs this file with vLLM's arguments. It has neither verl nor Ray, so stand-ins replace the
packages that import them.
"""

from __future__ import annotations

import json
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ADAPTER_ID = 123  # verl's VLLM_LORA_INT_ID


class Updates:
    """A middleware of vLLM: `POST /verl/update_weights {"folder", "version"}` replaces the adapter, or removes it."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/verl/update_weights":
            await self._app(scope, receive, send)
            return
        from starlette.requests import Request
        from starlette.responses import JSONResponse
        from vllm.lora.request import LoRARequest

        from rollout_backend.verl.vllm_middleware import attach

        body = json.loads(await Request(scope, receive).body())
        engine = scope["app"].state.engine_client
        await engine.pause_generation(mode="abort")
        await engine.remove_lora(ADAPTER_ID)
        if body["folder"] is not None:
            await engine.add_lora(LoRARequest(lora_name="123", lora_int_id=ADAPTER_ID, lora_path=body["folder"]))
        await engine.reset_prefix_cache()
        attach(SimpleNamespace(engine=engine, global_steps=body["version"]))
        await engine.resume_generation()
        await JSONResponse({"loaded": sorted(await engine.list_loras())})(scope, receive, send)


def stand_in(name: str, folder: Path | None = None, **attributes: object) -> None:
    """Replace a package by a module with these attributes. Its submodules are imported from `folder`."""
    module = ModuleType(name)
    vars(module).update(attributes)
    module.__path__ = [] if folder is None else [str(folder)]
    sys.modules[name] = module


if __name__ == "__main__":
    repository = Path(__file__).parents[2]
    stand_in("rollout_backend", repository / "rollout_backend")
    stand_in("rollout_backend.verl", repository / "rollout_backend" / "verl")
    for package in ("verl", "verl.workers", "verl.workers.rollout", "verl.workers.rollout.vllm_rollout"):
        stand_in(package)
    stand_in("verl.workers.rollout.vllm_rollout.utils", VLLM_LORA_INT_ID=ADAPTER_ID, VLLM_LORA_PATH="simon_lora_path")
    from rollout_backend.verl.vllm_middleware import MIDDLEWARE

    if find_spec("vllm.entrypoints.scale_out") is not None:  # 0.24.0 serves the token endpoint without this option
        sys.argv.append("--enable-scale-out")
    sys.path.insert(0, str(Path(__file__).parent))
    sys.argv += ["--middleware", "vllm_adapter_server.Updates", "--middleware", MIDDLEWARE]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
