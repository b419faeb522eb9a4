"""Write docs/performance.md and docs/performance.svg from docs/performance.json: `python docs/make_performance.py`.

With `--from runs/bench/results.json`, which `make bench` writes, that file becomes docs/performance.json first.
`page()` and `drawing()` return the two as text. A test compares them with the files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "benchmarks"))

import plot  # noqa: E402
import report  # noqa: E402

FLAMES = HERE / "flames"
RESULTS, PAGE, DRAWING = (HERE / f"performance.{kind}" for kind in ("json", "md", "svg"))

_HEAD = """\
# Performance

Generated from `docs/performance.json` by `python docs/make_performance.py`; do not edit.

To measure on your machine, run `make bench`. It takes some 20 minutes on two cores, installs the rivals from
the package index at the first time, and ends with these tables.
"""
_SUMMARY = """\
A floor is what the transport or the libraries below allow: a loop that signs the same calls and checks and stores the
results but handles no fault (checked HTTP), an HTTP proxy that only passes bytes on, one copy of the same bytes, or
the import of the dependencies alone. CPU is user and system time of the trainer's or the gateway's process. Latencies
are of a machine whose cores the load, the stand-ins and the measured process share, so they are upper bounds.
"""
_SECTIONS = {
    "collection": """\
One step of a run: sessions are invoked at a rate or at once, agents work for 1 s (some less, some more), and publish
results of 10 KB. S3 takes 30 ms, SQS 10 ms, an invoke 150 ms. p50 and p99 are the seconds from a result's PUT until
the trainer has it: decoded, checked and stored in the case of ours, and as JSON in the case of the rivals. Closing is
what is left to do when the trainer has the last result.

At once, all results arrive within a second or two, and one core collects them: the latency is the queue in front of
it. With 1 ms of CPU per result that is 1,000 results per second. In larger steps it still invokes sessions meanwhile.

The results are also written to the run's folder, and no folder is removed until all is measured. A disk with ext4 on
which thousands of files were deleted in the last five minutes takes up to 1 ms more for each result: it gives no new
file the place of a deleted one so soon, and searches for another.

- checked HTTP does what AWS and the promises of a run demand, and no more: it signs each call, gives each session a
  key, records it on the disk before and after its invoke and its stop, decodes each result, verifies its seal, and
  stores it. It calls the same functions as this package in straight lines, over the connections of bare HTTP. Nothing
  is retried, paced or reported, and a fault ends it. Its CPU time is the least that this work takes with these
  libraries.
- bare HTTP sends the bytes of the same calls over asyncio's connections. AWS would refuse them, because they are not
  signed, and no result is decoded. With 4,096 results at once, the emulator's core is its limit.
- boto3 in threads is the client that most would write first, in 100 lines. It decodes and checks nothing.
- toolkit is agentcore-rl-toolkit. With S3, it polls for each result; with HTTP, it asks the runtime for each. Its S3
  client closes a session before it hands over the result. Its results hold no tokens.
- agentlightning has no runtime, S3 or queue in between: agents reach its store directly, and the trainer asks the
  store every 5 s, as its verl daemon does.
""",
    "gateway": """\
Agents with tools call the model with a conversation of the given length, through the OpenAI API. The engine is a stub
that answers after a fixed time.

- toolkit is the gateway of agentcore-rl-toolkit, which renders and tokenizes as ours does.
- rllm-model-gateway and agentlightning pass the messages on to an engine that tokenizes, so they do less.
""",
    "training_step": """\
`examples/train_arithmetic` with a tiny random model, on the CPU. With verl's own agent loop a rollout is a coroutine
that calls the engine. With this backend it is an agent in a process, and S3, SQS, the runtime and the gateway run on
the same cores.
""",
}
_TITLES = {"collection": "Collection", "gateway": "Gateway", "training_step": "A training step"}
_CEILINGS = """\
The programs that stand in for AWS, the agents and the engine must not be the bottleneck. Alone they reach:
"""

_FLAMES = """\
Where the CPU time goes, by py-spy. Open a file in a browser to zoom in.
"""


def page(results: dict[str, Any]) -> str:
    return "\n".join(_lines(results))


def drawing(results: dict[str, Any]) -> str:
    return plot.picture(results)


def _lines(results: dict[str, Any]) -> Iterator[str]:
    yield _HEAD
    machine = results["machine"]
    yield (
        f"Measured on {results['date']}: {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, {machine['system']}, Python {machine['python']}.\n"
    )
    yield "## Summary\n"
    yield _SUMMARY
    yield report.summary(results).markdown() + "\n"
    yield "![The figures as bars](performance.svg)\n"
    for part, tables in report.DETAILS.items():
        found = list(tables(results))
        if found:
            yield f"## {_TITLES[part]}\n"
            yield _SECTIONS[part]
            for table in found:
                yield table.markdown() + "\n"
    yield "## Ceilings\n"
    yield _CEILINGS
    yield from (f"- {line}" for line in report.ceilings(results))
    flames = sorted(FLAMES.glob("*.svg"))
    if flames:
        yield "\n## Flame graphs\n"
        yield _FLAMES
        yield from (f"- [{flame.stem.replace('-', ', ')}](flames/{flame.name})" for flame in flames)
    if missing := report.failures(results):
        yield "\n## No figures\n"
        yield from (f"- {line}" for line in missing)
    yield "\n## Commands\n"
    yield "| part | command | s |\n| --- | --- | --- |"
    for part, command in results["commands"].items():
        yield f"| {part} | `{command}` | {results['seconds'][part]} |"
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, help="results that become docs/performance.json")
    args = parser.parse_args()
    if args.source:
        RESULTS.write_text(args.source.read_text())
    results = json.loads(RESULTS.read_text())
    PAGE.write_text(page(results), encoding="utf-8")
    DRAWING.write_text(drawing(results), encoding="utf-8")


if __name__ == "__main__":
    main()
