"""Shows the rollouts of one task in a terminal or as JSON: their rewards, and why they failed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_wrapper.contract import Outcome, readable
from rollout_backend.core.formats import count
from rollout_backend.results.findings import show_command
from rollout_backend.results.records import RolloutRecord
from rollout_backend.results.summary import duration, mean
from rollout_backend.results.terminal.live_view import one_line

_MAX_MESSAGE = 160


@dataclass(frozen=True)
class TaskView:
    """The rollouts of a task in one step. `show` is appended to each `rollout show`; it may be empty."""

    run_id: str
    step: int
    task_id: str
    payload: object  # None: the run's folder does not hold it
    records: tuple[RolloutRecord, ...]
    show: str = ""

    @property
    def rewards(self) -> list[float]:
        """Return the rewards. Missing ones are not among them."""
        return [record.reward for record in self.records if record.reward is not None]

    def fields(self) -> dict[str, Any]:
        """Return the task as an object for JSON."""
        return {
            "run_id": self.run_id,
            "step": self.step,
            "task_id": self.task_id,
            "payload": self.payload,
            "mean_reward": mean(self.rewards),
            "group_usable": any(record.group_usable for record in self.records),
            "rollouts": [record.model_dump(mode="json") for record in self.records],
        }

    def print(self, console: Console) -> None:
        """Print the task and a line for each rollout."""
        average = mean(self.rewards)
        usable = "usable" if any(record.group_usable for record in self.records) else "not usable"
        facts = [count(len(self.records), "rollout"), f"group {usable}"]
        facts.append("no reward" if average is None else f"mean reward {average:.3f}")
        if len(self.rewards) > 1 and len({*self.rewards}) == 1:
            facts.append("all rewards equal: nothing to learn from")
        console.print(
            Text.assemble((self.task_id, "bold"), f"  run {self.run_id}, step {self.step}: {', '.join(facts)}"),
            soft_wrap=True,
        )
        if self.payload is not None:
            text = readable(json.dumps(self.payload, ensure_ascii=False))
            console.print(Text(f"payload {text}"), soft_wrap=True)
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("rollout", "outcome", "reward", "turns", "tokens", "seconds", "reason"):
            table.add_column(name, justify="right" if name in ("reward", "turns", "tokens", "seconds") else "left")
        for record in self.records:
            table.add_row(*_cells(record))
        console.print(table)
        shown = next((record for record in self.records if record.failed), self.records[0])
        console.print(f"one of them: {show_command(shown.rollout_id)}{self.show}", highlight=False, soft_wrap=True)


def _cells(record: RolloutRecord) -> list[Text]:
    result, took = record.result, duration(record)
    why = f"{record.reason}: {record.message}" if record.reason and record.message else record.reason
    return [
        Text(record.rollout_id),
        Text(record.outcome or "not settled", "green" if record.outcome is Outcome.COMPLETED else "red"),
        Text("none" if record.reward is None else f"{record.reward:g}"),
        Text("" if result is None else str(result.turns)),
        Text("" if result is None else f"{result.sampled_tokens:,}"),
        Text("" if took is None else f"{took:.1f}"),
        Text(one_line(why)[:_MAX_MESSAGE]),
    ]
