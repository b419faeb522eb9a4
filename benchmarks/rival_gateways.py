"""Measure other projects' gateways with the load and the engine of `benchmarks/gateway.py`.

    python benchmarks/rival_gateways.py

The first run installs the rivals from the package index: see `rivals/environments.py`. Each has one core.

- bare proxy: an aiohttp server that only passes bytes on, which shows what the transport allows.
- toolkit: agentcore-rl-toolkit's gateway, which renders and tokenizes as ours does.
- rllm: rllm-model-gateway, which passes the messages on to an engine and stores the answers.

A rival that cannot be installed, or does not answer all calls in time, has no figures; the reason is in `failed`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from gateway import Scenario, Serve, System, measure
from rivals.environments import RivalFailed, environment, python_of

from rollout_backend.errors import RolloutBackendError
from rollout_backend.serving.install import find_model
from rollout_backend.serving.server_process import free_port

RIVALS_FOLDER = Path(__file__).parent / "rivals"
TABLE = (
    Scenario(),
    Scenario(stream=True),
    Scenario(8192),
    Scenario(in_flight=100, rate=500),
    Scenario(in_flight=100, stream=True, rate=500),
)  # streams are passed on by the bare proxy only
SMOKE = (Scenario(1024, 8),)


def _keys(scenario: Scenario) -> list[str]:
    return [f"session-{i}" for i in range(scenario.sessions)]


def bare_proxy(scenario: Scenario, model: Path, engine_port: int, work: Path) -> System:
    port = free_port()
    script = str(RIVALS_FOLDER / "serve_bare_proxy.py")
    return System([sys.executable, script, str(port), f"http://127.0.0.1:{engine_port}"], port, _keys(scenario))


def toolkit(scenario: Scenario, model: Path, engine_port: int, work: Path) -> System:
    port, python = free_port(), str(python_of("agentcore-rl-toolkit"))
    script = str(RIVALS_FOLDER / "serve_toolkit_gateway.py")
    argv = [python, script, str(port), f"http://127.0.0.1:{engine_port}", str(model)]
    return System(argv, port, _keys(scenario), env=environment())


def rllm(scenario: Scenario, model: Path, engine_port: int, work: Path) -> System:
    port, program = free_port(), str(python_of("rllm-model-gateway").with_name("rllm-model-gateway"))
    argv = [program, "--host", "127.0.0.1", "--port", str(port), "--db-path", str(work / "traces.db")]
    argv += ["--worker", f"http://127.0.0.1:{engine_port}/vllm/v1"]
    path = "/sessions/session-{i}/v1/chat/completions"
    return System(argv, port, _keys(scenario), path, env=environment())


RIVALS: dict[str, Serve] = {"bare proxy": bare_proxy, "toolkit": toolkit, "rllm-model-gateway": rllm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--smoke", action="store_true", help="little work, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for scenario in SMOKE if options.smoke else TABLE:
        for name in options.only:
            if scenario.stream and name != "bare proxy":
                continue
            try:
                made = asyncio.run(measure(scenario, find_model(), serve=RIVALS[name]))
            except (RivalFailed, RolloutBackendError, RuntimeError) as error:
                asked = dataclasses.asdict(scenario) | {"asked_in_flight": scenario.in_flight}
                made = asked | {"failed": str(error)}
            rows.append({"system": name, **made})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
