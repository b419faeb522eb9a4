"""Check from which weights the rows of a training were sampled, without any record of the backend.

    python benchmarks/row_origins.py WORK

WORK has what the engine logged (`sampled.jsonl`: prompts, tokens, and a digest of the weights that it had loaded) and
what the trainer trained (`trained.jsonl`: rows, and a digest of the weights of their step).
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from common import lines_of

WRONG = {
    "unknown tokens": "the engine never sampled them",
    "another prompt": "the engine sampled them after other tokens",
    "other weights": "the engine had other weights than the step trains",
    "another version": "the row names another version than the engine had",
    "another task": "the prompt is not of the step's task",
    "another reward": "the reward is not that of the last answer",
    "trained twice": "another row of the same lineage has them",
}

Lines = Sequence[Mapping[str, Any]]


def turns_of(row: Mapping[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens before each sampled turn, and the turn's own."""
    at = 0
    for sampled, run in groupby(row["mask"]):
        end = at + len(list(run))
        if sampled:
            yield row["tokens"][:at], row["tokens"][at:end]
        at = end


def lineage(steps: Lines) -> list[int]:
    """Return the indices of the steps whose weights led to the last ones: a later line of a step replaces it and all
    steps after it."""
    kept: list[int] = []
    for index, line in enumerate(steps):
        while kept and steps[kept[-1]]["step"] >= line["step"]:
            kept.pop()
        kept.append(index)
    return kept


def check(sampled: Lines, trained: Lines) -> dict[str, Any]:
    """Return the counts of a training, with the rows that are wrong by kind."""
    answers = {tuple(line["tokens"]): line for line in sampled}
    steps = [line for line in trained if "step" in line]
    began = {line["life"]: line["ready"] for line in trained if "ready" in line}
    wrong: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for line in steps:
        for row in line["rows"]:
            faults, turns = set(), [*turns_of(row)]
            found = [answers.get(tuple(tokens)) for _, tokens in turns]
            for (before, _), answer, versions in zip(turns, found, row["versions"], strict=True):
                if answer is None:
                    faults.add("unknown tokens")
                    continue
                faults |= {
                    *(["another prompt"] if answer["prompt_ids"] != before else []),
                    *(["other weights"] if answer["weights"] != line["weights"] else []),
                    *(["another version"] if {*versions} != {answer["version"]} else []),
                    *(["another task"] if row["question"] not in answer["prompt"] else []),
                }
            if found[-1] is not None and row["reward"] is not None:
                right = found[-1]["text"].endswith(f" {row['answer']}.")
                faults |= {"another reward"} if row["reward"] != right else set()
            earlier = [answer is not None and answer["at"] < began[line["life"]] for answer in found]
            counts += Counter({"rows": 1, "turns": len(turns), "sampled before a kill": any(earlier)})
            counts["sampled in two lives"] += any(earlier) and not all(earlier)
            wrong.update(faults)
            counts["wrong rows"] += bool(faults)
            examples |= dict.fromkeys(faults, f"life {line['life']}, step {line['step']}: {row['question']}")
    kept = lineage(steps)
    uses = Counter(tuple(tokens) for i in kept for row in steps[i]["rows"] for _, tokens in turns_of(row))
    wrong["trained twice"] = sum(count > 1 for count in uses.values())
    labels: defaultdict[str, set[str]] = defaultdict(set)
    for line in sampled:
        labels[line["version"]].add(line["weights"])
    return {
        "lives": len(began),
        "steps trained": len(steps),
        "steps of the last lineage": len(kept),
        **{name: counts[name] for name in ("rows", "turns", "sampled before a kill", "sampled in two lives")},
        "weights trained": len({line["weights"] for line in steps}),
        "weights sampled": len({line["weights"] for line in sampled}),
        "gaps in the last lineage": sum(steps[b]["step"] - steps[a]["step"] != 1 for a, b in pairwise(kept)),
        "versions of two weights": sum(len(weights) > 1 for weights in labels.values()),
        "wrong rows": counts["wrong rows"] + wrong["trained twice"],
        "wrong": {name: f"{wrong[name]}: {WRONG[name]}; {examples.get(name, '')}" for name in WRONG if wrong[name]},
    }


def check_folder(work: Path) -> dict[str, Any]:
    return check(lines_of(work / "sampled.jsonl"), lines_of(work / "trained.jsonl"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    found = check_folder(parser.parse_args().work)
    print(json.dumps(found, indent=1))
    sys.exit(1 if found["wrong rows"] or found["versions of two weights"] else 0)


if __name__ == "__main__":
    main()
