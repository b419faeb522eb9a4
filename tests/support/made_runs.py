"""Makes the folder of a run from a fixed seed, as a manager leaves it: for tests of reports, and for pictures."""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from tokenizers import Tokenizer

from agent_wrapper.contract import Failure, Outcome, Rollout, Segment, Turn, VersionSpan
from builders import function_call
from rollout_backend.core.ledger import LedgerEntry
from rollout_backend.core.tasks import Task
from rollout_backend.model.gateway.stats import EngineUse
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.accounts.records import RolloutRecord, StepRecords
from rollout_backend.run.accounts.step_report import GroupResult, failures_of, make_report
from rollout_backend.workbench.local.scripted import BYTE_MODEL
from rollouts import make_ledger

BEGAN = 1_795_350_000.0
FRUIT = {"melon": 9, "pear": 3, "plum": 2, "kiwi": 4, "fig": 6, "lime": 5, "date": 7, "apple": 8}
THOUGHTS = "I will look up the price first.", "Let me ask for the price of one.", "The price is in the shop's list."
TRACEBACK = """Traceback (most recent call last):
  File "/app/agent.py", line 41, in agent
    item = json.loads(call.function.arguments)["item"]
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
"""
MESSAGE = "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"


@dataclass(frozen=True)
class MadeRun:
    """What a run is made like. `skill` is the mean chance of a right answer; `lost` a part of the rollouts."""

    tasks: int = 48
    group: int = 8
    skill: float = 0.5
    lost: float = 0.06
    engines: EngineUse | None = None
    steps: int = 1
    seed: int = 7
    stored: int = 1_000_000  # results that are stored per step
    model: Path = BYTE_MODEL


def make_run(run_dir: Path, made: MadeRun = MadeRun()) -> Path:
    """Write the folder of a run and return it."""
    draw = random.Random(made.seed)
    archive, tokenizer = RunArchive(run_dir), Tokenizer.from_file(str(made.model / "tokenizer.json"))
    now = BEGAN
    for step in range(made.steps):
        grown = made.skill + (0.96 - made.skill) * (1 - math.exp(-3 * step / max(made.steps, 1)))
        now = _Step(archive, tokenizer, made, step, draw, now + 30, grown if made.steps > 1 else made.skill).run()
    archive.close()
    settings = {
        "run_id": run_dir.name,
        "model": {"path": str(made.model), "renderer": "chatml"},
        "storage": {"bucket": "rollouts"},
        "runtime": {"kind": "http", "url": "http://agents.internal:8080", "invoke_per_s": 6},
        "group": {"size": made.group},
        "sampling": {"max_tokens": 256},
        "timeouts": {"model_call_s": 60, "agent_s": 120, "collection_s": 600, "session_key_s": 1200},
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))
    return run_dir


def reopen_last_step(run_dir: Path, still_open: int) -> tuple[int, list[RolloutRecord]]:
    """Make the last step of a run one that runs, with some rollouts open. Return its number and its final records."""
    archive = RunArchive(run_dir)
    step = archive.steps()[-1]
    records = archive.read_records(step)
    undo = {"outcome": None, "reason": "", "result_at": None, "settled_at": None, "result": None, "trainable": False}
    opened = [
        each.model_copy(update={**undo, "deadline": time.time() + 100 + number})
        for number, each in enumerate(records[:still_open])
    ]
    for file in (f"{step:08d}.json", f"{step:08d}.rollouts.jsonl"):
        (run_dir / "steps" / file).unlink()
    archive.write_running(step, [each.model_dump_json() for each in (*records[still_open:], *opened)]).result()
    archive.close()
    return step, records


@dataclass
class _Step:
    """One step; the ledger's clock is set to the time of each event."""

    archive: RunArchive
    tokenizer: Tokenizer
    made: MadeRun
    step: int
    draw: random.Random
    began: float
    skill: float

    def __post_init__(self) -> None:
        self.now = self.began
        self.ledger = make_ledger(self.step, lambda: self.now)
        self.ledger.clock = lambda: self.now
        self.rollouts: list[Rollout] = []

    def run(self) -> float:
        names = [f"buy-{3 + i // len(FRUIT)}-{list(FRUIT)[i % len(FRUIT)]}" for i in range(self.made.tasks)]
        planned = [self.ledger.plan(f"{name}.{i}", name) for name in names for i in range(self.made.group)]
        ease = {name: min(1.0, max(0.0, self.draw.gauss(self.skill, 0.42))) for name in names}
        end = self.began
        per_s = max(6.0, len(planned) / 60)
        for number, each in enumerate(planned):
            self.now = self.began + 2 + number / per_s + self.draw.random()
            self._rollout(number, each, ease[each.task_id])
            end = max(end, self.now)
        trainable: dict[str, list[Rollout]] = {name: [] for name in names}
        for rollout in self.rollouts:
            if rollout.trainable:
                trainable[rollout.task_id].append(rollout)
        groups = [
            GroupResult(Task(name, {}), tuple(mine), len(mine) > 1, self.made.group)
            for name, mine in trainable.items()
        ]
        report = make_report(
            self.archive.run_dir.name, self.ledger, groups, self.rollouts, [0.2], [0.3],
            refused=0, seconds=end - self.began, deadline_reached=False, engine_use=self.made.engines,
        )  # fmt: skip
        assert len(failures_of(self.ledger)) == report.planned - report.outcomes[Outcome.COMPLETED]
        records = StepRecords(self.ledger, lambda each: f"CloudWatch, session {each.last_session_id}", self.rollouts)
        self.archive.write_records(self.step, records.all())
        self.archive.write_report(report)
        return end

    def _rollout(self, number: int, each: LedgerEntry, ease: float) -> None:
        session = f"rollout-{self.draw.getrandbits(128):032x}"
        each.start_attempt(session, 1, self.now + 120)
        fate = self.draw.random()
        if fate < self.made.lost / 2:
            self.now += self.draw.uniform(2, 20)
            each.settle(Outcome.INFRA_ERROR, "container_error", "424: the container answered 500")
            self.ledger.session_closed(session)
            return
        self.now += self.draw.uniform(0.6, 3)
        each.accept()
        accepted = self.now
        if fate < self.made.lost * 0.75:
            self.now += 120
            message = "the agent did not return within 120 s; it stood in agent.py:52 price()"
            each.settle(Outcome.TIMED_OUT, "agent_deadline", message)
            self.ledger.session_closed(session)
            return
        work = self.draw.lognormvariate(3.3, 0.55)
        self.now += work
        fails = fate < self.made.lost
        rollout = self._result(each, session, accepted, work, None if fails else ease)
        self.rollouts.append(rollout)
        each.deliver(
            rollout.outcome,
            trainable=rollout.trainable,
            reason=rollout.failure.reason if rollout.failure else "",
            message=rollout.failure.message if rollout.failure else "",
        )
        self.ledger.session_closed(session)
        if len(self.rollouts) <= self.made.stored:
            self.archive.write_rollout(rollout, rollout.encode())

    def _result(self, each: LedgerEntry, session: str, accepted: float, work: float, ease: float | None) -> Rollout:
        _, amount, fruit = each.task_id.split("-")
        price, number = FRUIT[fruit], int(amount)
        right = ease is not None and self.draw.random() < ease
        answer = price * number if right else price + number
        question = f"What do {amount} {fruit}s cost?"
        call = f'<tool_call>\n{{"name": "price", "arguments": {{"item": "{fruit}"}}}}\n</tool_call>'
        thought = self.draw.choice(THOUGHTS)
        how = "times" if right else "plus"
        last = f"One {fruit} costs {price}, so {amount} of them cost {price} {how} {amount} = {answer}."
        last += " Let me check that again." * self.draw.choice([0, 0, 1, 1, 2, 3, 6]) + f" The answer is {answer}."
        messages = [
            {"role": "system", "content": "You work in a shop. Use the tool, then answer with a number."},
            {"role": "user", "content": question},
            {"role": "assistant", "content": thought, "tool_calls": [function_call("price", {"item": fruit})]},
            {"role": "tool", "tool_call_id": "c1", "content": str(price)},
            {"role": "assistant", "content": last},
        ]
        cut = self.draw.random() < 0.08
        segment = self._segment(
            [f"{messages[0]['content']}{question}", f"{thought}\n{call}", str(price), last], work, messages, cut
        )
        fails = ease is None
        return Rollout(
            run_id=self.archive.run_dir.name,
            step=self.step,
            task_id=each.task_id,
            rollout_id=each.rollout_id,
            attempt=1,
            session_id=session,
            outcome=Outcome.AGENT_ERROR if fails else Outcome.COMPLETED,
            reward=None if fails else 1.0 if right else self.draw.choice([0.0, 0.2]),
            extras={} if fails else {"expected": price * number, "read": answer},
            failure=Failure(reason="agent_exception", message=MESSAGE, traceback=TRACEBACK) if fails else None,
            model="Qwen3-4B",
            segments=(segment,),
            started_at=accepted + 0.1,
            finished_at=accepted + work - 0.3,
        )

    def _segment(self, texts: Sequence[str], work: float, messages: list[dict], cut: bool) -> Segment:
        ids: list[int] = []
        mask: list[int] = []
        logprobs: list[float | None] = []
        turns: list[Turn] = []
        for number, text in enumerate(texts):
            new = self.tokenizer.encode(text, add_special_tokens=False).ids
            start, sampled = len(ids), number % 2 == 1
            ids += new
            mask += [int(sampled)] * len(new)
            logprobs += [-self.draw.expovariate(2.2) if sampled else None for _ in new]
            if sampled:
                version = str(max(0, self.step - (self.draw.random() < 0.2)))
                turns.append(
                    Turn(
                        start=start,
                        end=len(ids),
                        finish_reason="length" if cut and number == len(texts) - 1 else "stop",
                        weight_versions=[VersionSpan(version=version, start=start, end=len(ids))],
                        cached_tokens=int(start * (0.55 if number == 1 else 0.95)),
                        seconds=round(work * self.draw.uniform(0.25, 0.42), 2),
                    )
                )
        return Segment(token_ids=ids, response_mask=mask, logprobs=logprobs, turns=turns, messages=messages)
