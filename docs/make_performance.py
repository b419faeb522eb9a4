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

import report  # noqa: E402

FLAMES = HERE / "flames"
RESULTS, PAGE, DRAWING = (HERE / f"performance.{kind}" for kind in ("json", "md", "svg"))

_HEAD = """\
# Performance

Generated from `docs/performance.json` by `python docs/make_performance.py`; do not edit.
"""
_FIVE = (  # of the summary, by work and figure
    ("512 results at 25/s", "p50, s"),
    ("1,024 results at once", "CPU per rollout, ms"),
    ("calls with 2,048 tokens without a pause, 32 in flight", "calls/s"),
    ("calls with 2,048 tokens at 500/s, 100 in flight", "added p50, ms"),
    ("a step of the tiny model", "s"),
)
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
checked and stored by ours, as JSON by the rivals. Closing is what is left to do after the last result.

- checked HTTP is the floor: it signs, records, decodes, verifies and stores as this package does, without retries,
  pacing or reports.
- bare HTTP sends the bytes of the same calls unsigned, and decodes nothing.
- boto3 in threads decodes and checks nothing.
- toolkit is agentcore-rl-toolkit, which polls S3 or the runtime for each result. Its results hold no tokens.
- agentlightning has no runtime, S3 or queue: agents reach its store directly, and the trainer polls it every 5 s.
""",
    "gateway": """\
Agents with tools call the model with a conversation of the given length. The engine is a stub that answers after a
fixed time. toolkit is the gateway of agentcore-rl-toolkit, which renders and tokenizes as ours does;
rllm-model-gateway passes the messages on to an engine that tokenizes, so it does less.
""",
    "training_step": """\
`examples/train_arithmetic` with a tiny random model, on the CPU. With verl's own agent loop a rollout is a coroutine.
With this backend it is an agent in a process, and S3, SQS, the runtime and the gateway run on the same cores.
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
    return report.picture(results)


def _lines(results: dict[str, Any]) -> Iterator[str]:
    yield _HEAD
    summary = report.summary(results)
    five = [row for row in summary.rows if (row[0], row[1]) in _FIVE]
    yield report.Table("five", summary.header, five).markdown() + "\n"
    yield "![The figures as bars](performance.svg)\n"
    machine = results["machine"]
    yield (
        f"Measured on {results['date']}: {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, {machine['system']}, Python {machine['python']}. "
        "To repeat it: `make bench`, 20 minutes on two cores.\n"
    )
    yield _SUMMARY
    yield "## All figures\n"
    yield summary.markdown() + "\n"
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
