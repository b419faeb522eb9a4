"""Write tasks.jsonl next to this file: problems of reasoning-gym. The same seed gives the same file."""

import argparse
import json
from pathlib import Path

import reasoning_gym

SETTINGS = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 2}


def make_tasks(dataset: str, count: int, seed: int, **settings: int) -> list[dict[str, object]]:
    entries = reasoning_gym.create_dataset(dataset, size=count, seed=seed, **settings)
    return [
        {"task_id": f"{dataset}-{seed}-{i}", "payload": {"dataset": dataset, **entry}}
        for i, entry in enumerate(entries)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tasks = make_tasks("chain_sum", arguments.count, arguments.seed, **SETTINGS)
    Path(__file__).with_name("tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
