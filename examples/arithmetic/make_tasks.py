"""Write tasks.jsonl next to this file: sums of two single digits. The same seed gives the same file."""

import argparse
import itertools
import json
import random
from pathlib import Path


def make_tasks(count: int, seed: int) -> list[dict[str, object]]:
    pairs = list(itertools.product(range(1, 10), repeat=2))
    chosen = random.Random(seed).sample(pairs, count)
    return [
        {
            "task_id": f"sum-{a}-{b}",
            "payload": {"question": f"What is {a} + {b}? Answer with only a number.", "answer": str(a + b)},
        }
        for a, b in chosen
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=64, help="81 at most")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    lines = [json.dumps(task) + "\n" for task in make_tasks(arguments.count, arguments.seed)]
    Path(__file__).with_name("tasks.jsonl").write_text("".join(lines))
