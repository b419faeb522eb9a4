"""Train a tiny model whose right answers are long, while long rollouts are lost more often, in three ways.

    .venv-verl/bin/python benchmarks/lost_rollouts.py --json runs/results/losses.json

A question is answered 1, or sometimes 2. The model answers at once, or reads a page with the reply `?`; the last page
has the answer. docs/make_results.py says what the model learns, and what becomes of a lost rollout in each way. The
trainer is the loop of `examples/plain_loop`, with SGLang and the gateway; S3, SQS and AgentCore are emulated by their
wire protocols, and the agents run in `RolloutApp`. The curves show which part of the rollouts' first sessions was
right, the lost ones included.
"""

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import arguments, write_section
from emulated_aws import SESSION
from tiny_learner import Row, fit, row_of, train
from wrapped_agents import SessionRecord, WrappedAgents, backend_settings

from agent_wrapper import RolloutContext
from rollout_backend import RolloutManager, Task, load_config
from rollout_backend.workbench.local.scripted import BYTE_MODEL

OURS, AS_0, DROPPED = "ours", "lost as 0", "groups dropped"
PROMPT, READ, ANSWERS, NOTHING = "1 or 2?", "?", ("1", "2"), "-"
PAGE = 8  # bytes, all equal: a model of this size notices them sooner than a single one


@dataclass(frozen=True)
class Settings:
    steps: int = 12
    prompts: int = 8
    group: int = 4
    learning_rate: float = 1.5e-3
    pages: int = 3
    common: float = 0.7  # of the answers are 1
    risk: float = 0.15  # of a loss, for each model call
    reads_at_start: float = 0.7  # probability of reading a page, before training
    warm_steps: int = 60
    tails: tuple[tuple[int, int], ...] = ((38, 250),)  # see `fit`: the last page and the answer

    @property
    def shares(self) -> list[float]:
        return [self.common, 1 - self.common]


class Readers(WrappedAgents):
    """Agents that read pages. A lost one gets what AgentCore sends to a container that it ends: SIGTERM."""

    def __init__(self, settings: Settings, variant: str) -> None:
        super().__init__(lambda reply, answer: reply == answer)
        self.settings, self._variant = settings, variant

    async def _agent(self, context: RolloutContext) -> dict[str, Any]:
        rollout_id, answer = str(context.rollout_id), context.payload["answer"]
        first, calls, messages = self._sessions[rollout_id] == 1, 0, [{"role": "user", "content": PROMPT}]
        while True:
            reply, calls = (await self._reply(context, messages))["content"], calls + 1
            if reply != READ or calls > self.settings.pages:
                break
            page = PAGE * (answer if calls == self.settings.pages else NOTHING)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": page}]
        lost = self._lot(rollout_id) >= (1 - self.settings.risk) ** calls
        right = reply == answer
        self.records.append(SessionRecord(first, right, calls, lost))
        if lost and self._variant == AS_0:
            return {"reward": 0.0}
        if lost:
            stop = self._http.post("/stop", headers={SESSION: self._session(rollout_id)})
            asyncio.run_coroutine_threadsafe(stop, self._loop)
            await asyncio.sleep(context.remaining_s + 60)
        return {"reward": float(right)}


def plays(settings: Settings) -> list[Row]:
    """Return what a player does that reads now and then, and believes the last page."""
    from transformers import PreTrainedTokenizerFast

    tokenizer, draw, rows = PreTrainedTokenizerFast.from_pretrained(BYTE_MODEL), random.Random(0), []
    for _ in range(400):
        texts = [PROMPT]
        answer, guess = draw.choices(ANSWERS, settings.shares, k=2)
        for number in range(1, settings.pages + 1):
            if draw.random() >= settings.reads_at_start:
                break
            texts += [READ, PAGE * (answer if number == settings.pages else NOTHING)]
        rows.append(row_of(tokenizer, [*texts, answer if texts[-1] == PAGE * answer else guess]))
    return rows


async def run(variant: str, seeds: int, settings: Settings, model: Path, work: Path) -> list[dict[str, Any]]:
    """Train all seeds of a variant with one manager, and so with one engine and gateway."""
    agents, found = Readers(settings, variant), []
    async with agents.serve() as url:
        base = {
            **backend_settings(url, work),
            "run_id": variant.replace(" ", "-"),
            "model": {"path": str(model), "renderer": "chatml"},
            "serving": {"device": "cpu", "dtype": "float32", "threads": 1},
            "sampling": {"temperature": 1.0, "max_tokens": 4},
            "group": {"size": settings.group},
        }
        if variant == DROPPED:
            base["group"]["policy"] = "strict"
            base["runtime"]["max_attempts"] = 1
        async with RolloutManager(load_config(base=base, env={})) as manager:
            for seed in range(seeds):
                found.append({"variant": variant, "seed": seed, **await _run_one(manager, agents, model, seed)})
                print(variant, seed, *found[-1]["right"], flush=True)
    return found


async def _run_one(manager: RolloutManager, agents: Readers, model: Path, seed: int) -> dict[str, Any]:
    settings, draw = agents.settings, random.Random(seed)
    steps = [
        [
            Task(f"{seed}-{step}-{number}", {"answer": draw.choices(ANSWERS, settings.shares)[0]})
            for number in range(settings.prompts)
        ]
        for step in range(settings.steps)
    ]
    curve, calls = [], []
    counts: Counter[str] = Counter()
    async for result, _, _ in train(manager, model, steps, settings.learning_rate):
        firsts = [record for record in agents.records if record.first]
        curve.append(round(statistics.fmean(record.right for record in firsts), 4))
        calls.append(round(statistics.fmean(record.calls for record in firsts), 4))
        counts["sessions"] += len(agents.records)
        counts["lost"] += sum(record.lost for record in agents.records)
        counts["planned"] += result.report.planned
        counts["trained"] += sum(len(group.rollouts) for group in result.groups if group.usable)
        agents.records.clear()
    return {"right": curve, "calls": calls, **counts}


def main() -> None:
    options = arguments(__doc__).parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    settings, runs, began = Settings(steps=2 if options.smoke else Settings.steps), [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        fit(model, plays(settings), settings.warm_steps, tails=settings.tails)
        for variant in (OURS, AS_0, DROPPED):
            runs += asyncio.run(run(variant, 1 if options.smoke else 5, settings, model, Path(folder) / variant))
            command = ".venv-verl/bin/python benchmarks/lost_rollouts.py"
            results = {"settings": asdict(settings), "runs": runs}
            write_section(options.json, "losses", command, time.monotonic() - began, results)


if __name__ == "__main__":
    main()
