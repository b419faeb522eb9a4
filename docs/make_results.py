"""Write docs/results.md and its pictures from docs/results.json: `python docs/make_results.py`.

With `--from FILE`, what an experiment has written with `--json` becomes its section of docs/results.json first. An
experiment writes `section`, `date`, `machine`, `command`, `seconds` and `results`. To add an experiment, add a module
to benchmarks/ that makes its tables and picture, and a function to `SECTIONS` here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "benchmarks"))

import faults  # noqa: E402
import learning_report  # noqa: E402
import long_run  # noqa: E402
from common import Table, described  # noqa: E402

RESULTS, PAGE = HERE / "results.json", HERE / "results.md"

_HEAD = """\
# Results

Generated from `docs/results.json` by `python docs/make_results.py`; do not edit.

The results of experiments, each with the command that repeats it; `make results` repeats all but the last two. How
fast the backend is: see [performance](performance.md). What it guarantees: see [reliability](reliability.md).
"""
_FAULTS = """\
Each system runs one step of {groups} groups of {group} rollouts for each fault. [The fault bench](fault-bench.md)
says how the faults are injected, how outcomes are judged, and how to add a system.

- ours: `group.policy: replace`, with timeouts that are shorter than the defaults. It does not repeat an agent's own
  error, timeout or bad reward. It runs a rollout again whose stored result is invalid.
- toolkit, S3: `RolloutClient.run_batch_async` of agentcore-rl-toolkit {toolkit}; its caller checks the reward.
- toolkit, HTTP: the sessions of its agent loop for verl. By its documentation, a failed rollout whose agent has
  called the model is trained with the reward 0.
- agentlightning {lightning}: its server, its local controller and the rollout manager of its verl trainer. It
  gives a rollout without a reward `reward_fillna_value`, which is 0 by default. It has no retries.
- verl's loop: the agent loop, TransferQueue and replay buffer of verl {verl}'s synchronous v1 trainer, with their
  defaults. Agents are coroutines of the trainer, without a limit. What is missing is padded.
- SkyRL's generator: `SkyRLGymGenerator` of skyrl {skyrl} with its defaults, without its trainer, which needs a GPU.
  An agent is the step of an environment, in a thread of the trainer, without a limit. The first exception ends the
  step, and nothing of it is trained.

Not run: Uni-Agent. It has no release on the package index (`uni-agent` 0.1.1 there is another project): its
documentation starts it from a clone of its repository, with verl as a submodule.

The first number of a cell is how many of the {planned} rollouts are trained correctly, bold if all are. Rollouts that
are missing and not lost were reported as failed.
"""
_LEARNING = """\
A tiny model learns single-digit sums by GRPO, for {steps} steps of {prompts} questions with {group} rollouts each.
All runs have verl's v1 trainer, a real SGLang server on the CPU and the same settings. Runs of one seed have the same
initial model and questions; the engine samples without a seed. The figures are the part of the replies that is right.
Lines are means over the seeds and over seven steps, bands reach from the lowest seed to the highest.

- verl: verl's own agent loop, in which a rollout is a coroutine of the trainer.
- ours: each rollout is a session on an emulated AgentCore.
"""
_INTERVALS = """\
The mean difference of the runs of each seed, with its 95 % confidence interval (Student's t). An interval that
contains 0 shows no difference, and how large one could still be.
"""
_LEARNING_TIME = """\
The time of a step, as verl measures it. Emulated AWS, agents and other programs ran on the same two cores.
"""
_PARTS = """\
One run of each loop, {steps} steps of seed 0, with newer code than the runs above: do not compare the two tables.
Medians over the steps after the first. Trainer, engine, gateway, emulated AWS and all agents share two cores: CPU
seconds vary less than the time that has passed.

`gen` took {ours:.2f} s a step; with verl's own agent loop, {verl:.2f} s. The engine empties its cache when we pause
it, which shows that it is idle, and again when verl puts it to sleep. From our records:
"""
_PARTS_CALLS = """\
Of an agent's {agent_s:.2f} s, its one model call was {model_s:.2f} s at router and engine. The rest is its own
time, the gateway's, and waiting for a core.

CPU seconds of a step, by process. Our manager is in the trainer's main process. All agents and the emulated AWS are
one process, which production does not have. A rollout of verl's own agent loop is a coroutine; ours is invoked, sends
a heartbeat, calls the model, fetches its trajectory and writes it.
"""
_LOSSES = """\
The answer to a question is 1 in {common:g} % of the cases, otherwise 2. The model answers at once, or reads a page,
and may answer or read on. Page {pages} has the answer. So a guess takes one model call and is right in {common:g} %
of the cases; reading to the end takes {calls} calls and shows the answer. Each call has a risk of {risk:g} %. Whether
a rollout is lost is drawn once, after its last call, with the risk of all its calls: then its container gets SIGTERM
before it has published. These numbers were chosen so that a guess gets more than a long right answer if a loss counts
as 0: {guess:.2f} and {read:.2f}.

{variants}

The loop of `examples/plain_loop` trains the byte-level model of 90,000 weights for {steps} steps of {prompts}
questions with {group} rollouts each, with SGLang and the gateway; S3, SQS and AgentCore are emulated. The model is
first fitted to a player that reads on in {reads:g} % of the cases. All seeds begin with this model and have different
questions. The figures are the part of the rollouts' first sessions whose answer was right, the lost ones included.
Lines are means over the seeds and over three steps, bands reach from the lowest seed to the highest.
"""

_VARIANTS = {
    "ours": "a lost rollout is run again in another session, until it is complete.",
    "lost as 0": """\
a lost rollout is trained with its tokens and the reward 0, as other systems do. This backend cannot;
  here the agent itself returns the 0.""",
    "groups dropped": """\
nothing is run again, and a group that lost a rollout is not trained: `group.policy: strict` with
  `runtime.max_attempts: 1`. The rest of such a group is cancelled; what had not answered by then is in no figure.""",
}
_IDENTITY = """\
verl's own agent loop, and sessions on an emulated AgentCore with manager, gateway, S3, SQS, buffer and rows, train
the same model on the same {prompts} questions a step, with {group} rollouts each. In both, each reply has the same
seed, made of its step, task, rollout and turn. SGLang runs on the CPU in float32, one request at a time, with
`--enable-deterministic-inference`; verl has one thread, one rank and its own `grpo`. The byte-level model of 90,000
weights is right every fifth time at the start.

Compared are the columns with which each step trains the actor, row by row: tokens, masks and positions, logprobs of
the engine and of the trainer, rewards and advantages; and all weights after the last step.
"""
_IDENTITY_KILLED = """\
*killed*: a fifth of the rollouts lose their first session after it has sampled, and another session replaces it.
"""
_IDENTITY_ENDS = """\
If the model samples a special token inside of a reply, verl removes it from the text that its reward function gets,
and the gateway shows its name to the agent. The agents of this comparison remove it, too. In both ways rows arrive in
any order, on which sums depend: `RolloutSampler` brings ours into the order of the prompts, and the comparison does
the same for verl's on the v1 trainer.
"""

_LONG_RUN = """\
For {hours:g} hours a trainer collects one step of {rollouts} rollouts after the other, at a low rate, and its
processes get SIGKILL at random: every 20 to 90 s the trainer, the gateway, the engine or the janitor in the first
half; not the trainer in the third quarter, nor the gateway in the last. The experiment starts the trainer again, the
backend its gateway and engine, and the next trainer has a new janitor. Agents are processes; S3, SQS and AgentCore
are emulated, and the engine answers by rule, in {answer_s[0]:g} to {answer_s[1]:g} s.
"""
_PIECES = """\
The run had {pieces} pieces. At the end of each, all processes got SIGKILL, as if the machine had lost power, and the
next one continued with new emulators from a copy of the bucket on the disk.
"""
_OVER_TIME = """\
All that was read over the whole time, as medians of each quarter. A lag is from a result's PUT to the trainer, a
restart from a trainer's start to its first step, and *files* are those in the run's folder.
"""
_LIVES = """\
A trainer of a policy of 400 weights saves a checkpoint every {save_every} steps, and one of trainer, gateway, engine
and janitor gets SIGKILL every {pause} s. So steps are repeated, and no two updates are equal bit by bit: the weights
of a repeated step have the same name as before, and other values. Agents make two model calls each. All of them are
processes; S3, SQS and AgentCore are emulated. The trainer is a loop of `RolloutManager` that names weights as verl's
trainer does.

The checker reads two logs: the engine's, with a digest of the weights that it had loaded and the tokens of each
answer, and the trainer's, with a digest of the weights of each step and its rows. It reads nothing that the backend
writes.
"""
_GROWTH = """\
Memory and descriptors are those of each process, emulators and agents left out. *One process* is the one of its kind
that ran longest, without its first 10 minutes; *one process to the next* compares what each had at its end. Growth is
the slope of a line through all samples. Other programs ran on the same two cores, which makes starts and lags longer.
A trainer reserves the ports of the last 256 servers that it started, so each restart of an engine adds a descriptor.
"""

_MANY_TURNS = """\
Trainer, SGLang, the gateway, S3, SQS and AgentCore run on this machine, with a process for each agent. The byte-level
model of 90,000 weights is first fitted to {transcripts} rollouts of a weak player; all seeds of a task begin with one
such model and have different tasks. The length of the fit and the learning rate were chosen by simulations and runs
of the first seed, which are not in the tables.
"""
_TRAININGS = {
    "lake": """\
FrozenLake-v0 of TextArena {textarena}: a move per turn, at most {max_moves} moves. The agent shows the four cells
around the player, because TextArena's text is too long for this model. After every {compact_after} moves it replaces
the conversation by the list of moves and the cells, so a new segment begins. The reward is TextArena's: 1 at the
goal; otherwise the part of the way, at most 0.95, where the agent fell into a hole or made a second invalid move in a
row. verl trains, by GRPO on {group} rollouts of each of {prompts} tasks a step.
""",
    "rooms": """\
A row of {rooms} rooms, each with four doors. A tool reads the note on the wall: the number of the right door, eight
times. A reply without a call opens a door. The right one leads to the next room and to a new conversation, so a new
segment begins; a wrong one, or a third call, ends the rollout. The reward is the part of the rooms that were left.
The weak player reads the note in a third of the cases, and follows it; the model learns to look more often.
The loop of `examples/plain_loop` trains, by GRPO on {group} rollouts of each of {prompts} tasks a step, with one
engine for all seeds. The fit decides: after a shorter one, many calls of the first seed were malformed, and its
reward fell.
""",
}
_GPU_LEARNING = """\
{device}, {versions}. A model with {hidden} dimensions, {layers} layers and one token per byte opens a
lock of {digits} digits: the tool `look` reads one digit of the code at a time, {note} times, and a reply without a
call is the code. The reward is the part of the digits that is right. The model was made on that machine, and fitted
to {transcripts} rollouts of a player that reads a digit that it does not know with the probability {looks:g}. Each
training has up to {steps} steps of GRPO on {prompts} tasks with {group} rollouts each, with verl's v1 trainer and
SGLang.

- verl: verl's own tool loop, in which a rollout is a coroutine of the trainer.
- ours: each rollout is a process that runs on an emulated AgentCore, and calls the model through the gateway; S3 and
  SQS are emulated, too. Each reply has at most 64 tokens; a reply in verl's loop, what is left of {response_tokens}.

Each has one run, so a difference of the curves may be chance: the engine samples without a seed.
"""
_GPU_LEARNING_TIME = """\
The time of a step after the first, as verl measures it:
"""
_MANY_TURNS_TABLE = """\
A line is the mean of the seeds, in a band of all seeds. `a -> b` are the means of the first and last {ends} steps.
The gain is the mean of the seeds' differences, with its 95 % confidence interval (Student's t).
"""
_PLAYED = """\
The mean contents of a rollout, and the largest difference between the engine's probability of a trained token
and the trainer's:
"""


def page(sections: dict[str, Any]) -> str:
    return "\n".join(_lines(sections))


def pictures(sections: dict[str, Any]) -> dict[str, str]:
    """Return the pictures by their file names."""
    drawn = {}
    curves = {
        "many_turns": ("many-turns", tuple(_TRAININGS), "reward", 1),
        "learning": ("learning-path", ("verl", "ours"), "right replies", 3),
        "gpu_learning": ("gpu-learning", ("verl", "ours"), "reward", 0),
        "losses": ("losses", tuple(_VARIANTS), "right answers", 1),
    }
    for section, (name, variants, label, neighbours) in curves.items():
        if section in sections:
            results = sections[section]["results"]
            drawn[f"results-{name}.svg"] = learning_report.picture(results, variants, label, neighbours)
    if "long_run" in sections:
        drawn["results-long-run.svg"] = long_run.picture(sections["long_run"]["results"])
    return drawn


def _lines(sections: dict[str, Any]) -> Iterator[str]:
    yield _HEAD
    for name, (title, lines) in SECTIONS.items():
        if name not in sections:
            continue
        section = sections[name]
        yield f"## {title}\n"
        yield f"    {section['command']}\n"
        yield f"{section['date']}, {section['seconds'] / 60:.0f} minutes on {described(section['machine'])}.\n"
        yield from lines(section["results"])


def _faults(results: dict[str, Any]) -> Iterator[str]:
    versions = results["versions"]
    yield _FAULTS.format(
        **results["settings"],
        planned=faults.planned(results),
        toolkit=versions.get("toolkit, S3", ""),
        lightning=versions.get("agentlightning", ""),
        verl=versions.get("verl's loop", ""),
        skyrl=versions.get("SkyRL's generator", ""),
    )
    yield from results.get("notes", ())
    yield "### All faults together\n"
    yield faults.totals(results).markdown() + "\n"
    yield "### Each fault\n"
    yield faults.table(results).markdown() + "\n"
    yield "### What the systems said of missing rollouts\n"
    yield from (f"- {line}" for line in faults.reasons(results))
    yield ""


def _many_turns(results: dict[str, Any]) -> Iterator[str]:
    yield _MANY_TURNS.format(**results["settings"])
    for name, text in _TRAININGS.items():
        if name in results["settings"]:
            yield text.format(**results["settings"][name], **results["versions"])
    yield "![The reward over the steps](results-many-turns.svg)\n"
    yield _MANY_TURNS_TABLE.format(ends=learning_report.ENDS)
    yield learning_report.learned(results).markdown() + "\n"
    yield _PLAYED
    yield learning_report.in_play(results).markdown() + "\n"


def _gpu_learning(results: dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(" ".join(each) for each in results["versions"].items())
    yield _GPU_LEARNING.format(device=results["device"], versions=versions, **results["settings"])
    yield "![The reward over the steps](results-gpu-learning.svg)\n"
    yield learning_report.on_a_gpu(results).markdown() + "\n"
    yield _GPU_LEARNING_TIME
    yield learning_report.parts(results).markdown() + "\n"


def _learning(results: dict[str, Any]) -> Iterator[str]:
    yield _LEARNING.format(**results["settings"])
    yield "![Right replies over training, verl and ours](results-learning-path.svg)\n"
    yield learning_report.outcomes(results).markdown() + "\n"
    yield _INTERVALS
    yield learning_report.differences(results, "verl").markdown() + "\n"
    yield _LEARNING_TIME
    yield from results.get("notes", ())
    yield learning_report.parts(results).markdown() + "\n"


def _parts(results: dict[str, Any]) -> Iterator[str]:
    runs = {run["variant"]: run for run in results["runs"]}
    yield _PARTS.format(**results["settings"], **{variant: run["gen_s"] for variant, run in runs.items()})
    yield learning_report.timeline(results).markdown() + "\n"
    yield _PARTS_CALLS.format(**runs["ours"]["timeline_s"])
    yield learning_report.cpu(results).markdown() + "\n"


def _losses(results: dict[str, Any]) -> Iterator[str]:
    settings = results["settings"]
    calls, common, risk = settings["pages"] + 1, settings["common"], settings["risk"]
    yield _LOSSES.format(
        **{name: settings[name] for name in ("pages", "steps", "prompts", "group")},
        calls=calls,
        common=100 * common,
        risk=100 * risk,
        reads=100 * settings["reads_at_start"],
        guess=common * (1 - risk),
        read=(1 - risk) ** calls,
        variants="\n".join(
            f"- {name}: {text}" for name, text in _VARIANTS.items() if learning_report.runs_of(results, name)
        ),
    )
    yield "![Right answers over training, with and without losses](results-losses.svg)\n"
    yield learning_report.outcomes(results).markdown() + "\n"
    yield _INTERVALS
    yield learning_report.differences(results, "ours").markdown() + "\n"
    yield learning_report.losses(results).markdown() + "\n"


def _identity(results: dict[str, Any]) -> Iterator[str]:
    yield _IDENTITY.format(**results["settings"])
    yield _IDENTITY_KILLED
    header = (
        "trainer",
        "run",
        "steps",
        "rows",
        "tokens",
        "sessions",
        "killed",
        "differing columns",
        "differing weights",
    )
    lines = [
        [
            *(each["trainer"], each["variant"]),
            *(f"{each[name]:,}" for name in ("steps", "rows", "tokens", "sessions", "killed")),
            str(len(each["differences"])),
            f"{each['differing_weights']:,} of {each['weights']:,}",
        ]
        for each in results["comparisons"]
    ]
    yield Table(header, lines).markdown() + "\n"
    compared = {each[name] for each in results["comparisons"] for name in ("trainer", "variant")}
    missing = {"legacy": "the legacy trainer", "ours, killed": "lost sessions"}
    names = [what for name, what in missing.items() if name not in compared]
    yield f"Not compared: {', '.join([*names, 'asynchronous trainers', 'vLLM', 'conversations of many turns'])}.\n"
    yield _IDENTITY_ENDS


def _long_run(results: dict[str, Any]) -> Iterator[str]:
    account = results["account"]
    rollouts = account["planned"] // max(1, account["steps"])
    yield _LONG_RUN.format(hours=account["hours"], rollouts=rollouts, answer_s=results["answer_s"])
    if (pieces := results["settings"].get("pieces", 1)) > 1:
        yield _PIECES.format(pieces=pieces)
    yield from results.get("notes", ())
    yield long_run.accounts(results).markdown() + "\n"
    yield "![Memory, descriptors, lag, starts and rollouts over the run](results-long-run.svg)\n"
    yield _GROWTH
    yield long_run.growth(results).markdown() + "\n"
    yield _OVER_TIME
    yield long_run.over_time(results).markdown() + "\n"


def _lives(results: dict[str, Any]) -> Iterator[str]:
    pause = " to ".join(f"{float(each):g}" for each in results["settings"]["pause"].split())
    yield _LIVES.format(**results["settings"] | {"pause": pause})
    yield from results.get("notes", ())
    yield long_run.accounts(results).markdown() + "\n"


SECTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], Iterator[str]]]] = {
    "faults": ("Rivals under the same faults", _faults),
    "many_turns": ("Many turns, segments and tools", _many_turns),
    "identity": ("The same training as with verl's own agent loop", _identity),
    "learning": ("Learning through the cloud", _learning),
    "gpu_learning": ("Learning on one GPU", _gpu_learning),
    "parts": ("Where a step's time goes", _parts),
    "losses": ("What lost rollouts cost", _losses),
    "long_run": ("A long run with kills", _long_run),
    "lives": ("A training of many lives", _lives),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, help="an experiment's file, which becomes its section")
    args = parser.parse_args()
    sections = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if args.source:
        section = json.loads(args.source.read_text())
        sections[section.pop("section")] = section
        RESULTS.write_text(json.dumps(sections, indent=1) + "\n")
    PAGE.write_text(page(sections), encoding="utf-8")
    for name, drawing in pictures(sections).items():
        (HERE / name).write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main()
