"""Write docs/performance.md and docs/performance.svg from docs/performance.json: `python docs/make_performance.py`.

With `--from runs/bench/results.json`, which `make bench` writes, the parts in that file replace those of
docs/performance.json first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "benchmarks"))

import run_all  # noqa: E402
from common import described  # noqa: E402

RESULTS, PAGE, DRAWING = (HERE / f"performance.{kind}" for kind in ("json", "md", "svg"))

_HEAD = """\
# Performance

Generated from `docs/performance.json` by `python docs/make_performance.py`; do not edit.
"""
_SUMMARY = """\
Results are collected by the trainer, calls are answered by a gateway. Agents, engine and AWS are stand-ins on the
same two cores, so latencies are upper bounds. CPU is user and system time of the measured process. A floor is what
the transport or the libraries allow: a loop that signs, checks and stores but handles no fault, a proxy that passes
bytes on, or the import of the dependencies alone.
"""
_SECTIONS = {
    "collection": """\
One step: sessions are invoked at a rate or at once, agents work for about 1 s, and publish results of 10 KB. S3 takes
30 ms, SQS 10 ms, an invoke 150 ms. p50 and p99 are the seconds from a result's PUT until the trainer has it: decoded,
checked and stored by ours, as JSON by the rivals.

- checked HTTP is the floor: it signs, records, decodes, verifies and stores as this package does, without retries,
  pacing or reports.
- boto3 in threads decodes and checks nothing.
- toolkit is agentcore-rl-toolkit, which polls S3 or the runtime for each result. Its results hold no tokens.
""",
    "gateway": """\
Agents with tools call the model with a conversation of the given length. The engine is a stub that answers after a
fixed time. toolkit is the gateway of agentcore-rl-toolkit, which renders and tokenizes as ours does;
rllm-model-gateway passes the messages on to an engine that tokenizes, so it does less. Without a gateway, the load
generator calls the stub on one core, and the CPU is the stub's.
""",
    "training_step": """\
`examples/train_arithmetic` with a tiny random model, on the CPU. With verl's own agent loop a rollout is a coroutine.
With this backend it is an agent in a process, and S3, SQS, the runtime and the gateway run on the same cores.
""",
    "wrapper": """\
The overhead of a wrapper in an agent's container, without delays of the network. The first rollout of a container is
cold, and on AgentCore each is the first one. Ours fetches the trajectory of 16,000 tokens, and stores it with the
result; the toolkit's results hold none, and it announces nothing.
""",
    "large_step": """\
A step of thousands of long rollouts, on two cores. All sessions of a gateway process call the model at once, turn by
turn, with their whole conversations; a turn samples 60 tokens and gets a tool's result of 640. The engine is a stub
that answers at once. Then the trainer collects as many results, makes their rows, and puts them into TransferQueue.
verl's trainer pads all rows to the longest response when it computes advantages (`grpo_skip_missing`) and metrics.

The load average is that of other work on the machine before a size began. Above 2, seconds say nothing and CPU times
are several times too high, so they are left out. An empty cell was not measured. Without `--sizes`, the command
measures 1,024, 2,048 and 4,096 sessions, and needs an idle machine with 16 GB of free memory.
""",
    "ceilings": """\
The emulated AWS must not be the bottleneck. Alone, on one core and without latencies, it reaches:
""",
}
_EARLIER = """\
CPU per rollout or call, in ms, and the floor's in parentheses. The two columns on the right are of one machine and
day, each with its own benchmarks.

- Collection costs more than on 25 November, and no more than on 26 November. In between, aiohttp's client replaced an
  HTTP client of this project, which had a defect. With the code before and after this change, 1,024 results at once
  took 1.64 and 2.61 ms at best of four runs each, on a busy machine. The floor still has a client of its own.
- A gateway's calls cost about what they did on 26 November. On 30 November both codes took turns, three runs each, on
  a day when both were slower than in the table. The medians with the newer code, and with that of 26 November, in ms:
  1.98 and 2.01 at 500 calls a second, 2.30 and 2.38 with 32,768 tokens, 1.57 and 1.60 streamed without a pause, 1.29
  and 1.29 with 1,000 in flight, 1.98 and 1.86 with 1 in flight. Runs of one code differ by up to a third.
- The table is of 29 November, when calls with 32,768 tokens cost a third more. Since then, the new end of a long
  conversation is no longer handed to a thread. A session with so many tokens takes .5 MiB, and took 1 MiB on 26
  November.
- Streamed calls at 500/s take 2 ms each, now and then, which is all of the gateway's core, so calls wait.
"""
_TITLES = {
    "collection": "Collection",
    "gateway": "Gateway",
    "training_step": "A training step",
    "wrapper": "A container",
    "ceilings": "Ceilings",
    "large_step": "A large step",
}


def page(results: dict[str, Any]) -> str:
    return "\n".join(_lines(results))


def _lines(results: dict[str, Any]) -> Iterator[str]:
    yield _HEAD
    yield run_all.summary(results).markdown() + "\n"
    yield "![The figures as bars](performance.svg)\n"
    machines = defaultdict(list)
    for part, machine in results["machines"].items():
        machines[described(machine)].append(_TITLES[part])
    if len(machines) == 1:
        yield f"Measured on {next(iter(machines))}. To repeat it: `make bench`.\n"
    else:
        yield "Measured with `make bench` on several machines:\n"
        yield from (f"- {', '.join(titles)}: {machine}" for machine, titles in machines.items())
        yield ""
    yield _SUMMARY
    for part in results["parts"]:
        yield f"## {_TITLES[part]}\n"
        yield _SECTIONS[part]
        yield run_all.table(results, part).markdown() + "\n"
    if results.get("earlier"):
        yield "## Compared with earlier code\n"
        yield _EARLIER
        yield run_all.compared(results).markdown() + "\n"
    if missing := run_all.failures(results):
        yield "## No figures\n"
        yield from (f"- {line}" for line in missing)
        yield ""
    yield "## Commands\n"
    yield "| part | date | command | s |\n| --- | --- | --- | --- |"
    for part, command in results["commands"].items():
        yield f"| {part} | {results['dates'][part]} | `{command}` | {results['seconds'][part]} |"
    yield ""


def merged(results: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """Return the results with the parts of `fresh` in place of their earlier figures or failures."""
    found = dict(results)
    for name in ("parts", "failed", "commands", "seconds", "dates", "machines"):
        kept = {part: value for part, value in results[name].items() if part not in fresh["commands"]}
        found[name] = kept | fresh[name]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, help="results that replace those of the same parts")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text())
    if args.source:
        results = merged(results, json.loads(args.source.read_text()))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results), encoding="utf-8")
    DRAWING.write_text(run_all.picture(results), encoding="utf-8")


if __name__ == "__main__":
    main()
