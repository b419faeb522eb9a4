"""Train one small model on a task with a tool, through the whole backend and with verl's own tool loop, on one GPU.

    make learn-gpu
    python benchmarks/gpu_learning.py --minutes 9 --json runs/results/gpu_learning.json
    python benchmarks/gpu_learning.py --verl +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=triton
    .venv-verl/bin/python benchmarks/gpu_learning.py --smoke            # the same at small size, on the CPU

The task is `games/lock.py`. Everything is real except the cloud, which is on this machine: verl's v1 trainer, SGLang,
the router, the gateway and a process for each agent; S3, SQS and AgentCore are emulated. Nothing is downloaded: the
model is made here, and first fitted to what a weak player does in the same agents.

The command may be stopped or killed at any time, and `--minutes` stops it. Run it again to continue: a finished part
is not repeated, and a training continues from its last checkpoint. `--json` is written after each step, so a machine
that is taken away leaves it, too. If one training fails, the other one runs.
"""

import asyncio
import contextlib
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil  # verl needs it, too
from common import HERE, arguments, write_section
from games.lock import LOOK, NOTE, max_replies, question
from many_turns import TIMEOUTS, Game, play, summary_of
from tiny_learner import Row, fit, known_to
from verl_training import ORDERED, Training, averages, batch_overrides, parts_of

from agent_wrapper.contract import Segment
from rollout_backend import Task
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.workbench.local.cloud import LocalCloud
from rollout_backend.workbench.local.scripted import BYTE_MODEL, ToolCall
from rollout_backend.workbench.local.session_pool import EmulatorLimits

VERL, OURS = "verl", "ours"
# verl's settings of tools, in JSON, which is YAML.
TOOLS = {"tools": [{"class_name": "lock_tool.Look", "config": {"type": "native"}, "tool_schema": LOOK}]}
LOOKS = 0.6
"""The probability with which the weak player reads a digit that it does not know."""
HELD_OUT, KNOWS = 32, 0.9
"""Transcripts to which the model is not fitted, and the mean probability of all digits read there that is enough."""
AGENT = HERE / "games" / "lock.py"
# What the gateway's ChatML renderer makes of a conversation with one call in a reply, for verl's own loop.
TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if tools -%}
{{ '<|im_start|>system\n' + (system + '\n\n' if system else '') }}
{{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with \
function signatures within <tools></tools> XML tags:\n<tools>\n' }}
{%- for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor -%}
{{ '</tools>\n\nFor each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n\
</tool_call><|im_end|>\n' }}
{%- elif system -%}
{{ '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif -%}
{%- for message in messages if message.role != 'system' -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{%- set called = {'name': call.function.name, 'arguments': call.function.arguments} -%}
{{ '<tool_call>\n' + (called | tojson) + '\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""


@dataclass(frozen=True)
class Size:
    """How large the model and the trainings are."""

    digits: int
    hidden: int
    layers: int
    heads: int
    transcripts: int
    fits: int
    """At most. The model is fitted again until it knows what it has read."""
    fit_steps: int
    fit_rate: float
    prompts: int
    group: int
    rows_at_once: int
    steps: int
    save_every: int
    learning_rate: float
    prompt_tokens: int = 640
    response_tokens: int = 512


FULL = Size(
    digits=4, hidden=512, layers=8, heads=8, transcripts=2048, fits=3, fit_steps=1500, fit_rate=5e-4,
    prompts=32, group=8, rows_at_once=32, steps=30, save_every=5, learning_rate=3e-5, response_tokens=768,
)  # fmt: skip
SMALL = Size(
    digits=2, hidden=64, layers=2, heads=4, transcripts=80, fits=1, fit_steps=20, fit_rate=3e-3,
    prompts=4, group=4, rows_at_once=16, steps=3, save_every=1, learning_rate=6e-4,
)  # fmt: skip


class Lock(Game):
    """The task, with agents that run in this environment, so that nothing is installed."""

    def tasks(self, seed: int, count: int) -> list[Task]:
        draw = random.Random(f"{self.name} {seed}")
        codes = ["".join(draw.choices("0123456789", k=self.payload["digits"])) for _ in range(count)]
        return [Task(f"{self.name}-{seed}-{i}", {"code": code}) for i, code in enumerate(codes)]

    def cloud(self, work: Path) -> LocalCloud:
        limits = EmulatorLimits(max_sessions=1024, parallel_starts=psutil.cpu_count() or 4)
        return LocalCloud(AGENT, run_dir=work / "cloud", python=Path(sys.executable), limits=limits)


def weak_player(digits: int) -> Any:
    draw = random.Random(0)  # not by the prompt: those with the same notes are equal

    def reply(prompt: str) -> str:
        notes = [part[1] for part in prompt.split("<tool_response>")[1:]]
        if len(notes) < digits and draw.random() < LOOKS:
            return str(ToolCall(LOOK["function"]["name"]))  # type: ignore[index]
        return "".join(notes[:digits]) + "".join(draw.choices("0123456789", k=digits - len(notes)))

    return reply


def lock_of(size: Size) -> Lock:
    return Lock(
        name="lock",
        agent=AGENT.name,
        player=weak_player(size.digits),
        payload={"digits": size.digits},
        steps=size.steps,
        prompt_tokens=size.prompt_tokens,
        response_tokens=size.response_tokens,
        group=size.group,
        learning_rate=size.learning_rate,
        prompts=size.prompts,
    )


def make_model(folder: Path, size: Size) -> None:
    """Create a random model with one token per byte, whose type verl knows to be ChatML."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder.mkdir(parents=True)
    for file in BYTE_MODEL.glob("*.json"):
        shutil.copy(file, folder)
    names = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": TEMPLATE}, indent=1))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(folder)


async def prepare(work: Path, size: Size, game: Lock, device: str) -> Path:
    """Return the folder of the fitted model, and make it unless it exists."""
    model, unfitted = work / "model", work / "unfitted"
    if not model.exists():
        shutil.rmtree(unfitted, ignore_errors=True)
        make_model(unfitted, size)
        rollouts = await play(game, work / "player", size.transcripts)
        played = [segment for rollout in rollouts for segment in rollout.segments]
        rows: list[Row] = [(list(segment.token_ids), list(segment.response_mask)) for segment in played[HELD_OUT:]]
        read = [digits_read(segment, size.digits) for segment in played[:HELD_OUT] if len(segment.turns) > 1]
        for _ in range(size.fits):
            await asyncio.to_thread(fit, unfitted, rows, size.fit_steps, device=device, learning_rate=size.fit_rate)
            knows = await asyncio.to_thread(known_to, unfitted, read, device)
            print(f"the fitted model knows the digits that it has read with probability {knows:.2f}", flush=True)
            if knows >= KNOWS:
                break
        unfitted.rename(model)
    return model


def digits_read(segment: Segment, digits: int) -> Row:
    """Return a row in which only the digits of the answer that were read count as sampled."""
    answer, mask = segment.turns[-1], [0] * len(segment.token_ids)
    ends = answer.start + min(len(segment.turns) - 1, digits)
    mask[answer.start : ends] = [1] * (ends - answer.start)
    return list(segment.token_ids), mask


# --- what the machine does --------------------------------------------------------------------------------


def ask_gpu(*fields: str) -> list[str]:
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)
    return [value.strip() for value in done.stdout.splitlines()[0].split(",")]


def load_of(device: str) -> list[float]:
    """Return how busy the GPU, or the CPU, is in percent, and the MiB in use; nothing if the GPU does not answer."""
    if device == "cpu":
        return [psutil.cpu_percent(), psutil.virtual_memory().used / 2**20]
    try:
        return [*map(float, ask_gpu("utilization.gpu", "memory.used"))]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


@contextlib.asynccontextmanager
async def watched(training: Training, device: str, write: Callable[[], None]) -> AsyncIterator[None]:
    """Append a line each second to `load.jsonl`: the steps of this process of verl, how busy the device is, used MiB.

    Call `write` after each step.
    """
    before, known = len(training.lives), 0

    async def watch() -> None:
        nonlocal known
        with (training.work / "load.jsonl").open("a") as file:
            while True:
                steps = sum(metrics.read_text().count("\n") for metrics in training.lives[before:])
                if load := await asyncio.to_thread(load_of, device):
                    print(json.dumps([steps, *load]), file=file, flush=True)
                if steps > known:
                    known = steps
                    write()
                await asyncio.sleep(1)

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        yield
        watching.cancel()


# --- the trainings ----------------------------------------------------------------------------------------


async def train(variant: str, training: Training, size: Size, game: Lock, more: Sequence[str]) -> None:
    """Train to the last step, or continue after the last checkpoint. `more` are settings of verl."""
    work, rollout = training.work, "actor_rollout_ref.rollout"
    own = [
        *batch_overrides(
            size.prompts, size.group, size.rows_at_once, size.prompts, size.response_tokens, size.learning_rate
        ),
        f"data.max_prompt_length={size.prompt_tokens}",
        f"trainer.save_freq={size.save_every}",
        "trainer.resume_mode=auto",
        # verl deletes an older checkpoint before it names the new one as the latest.
        "trainer.max_actor_ckpt_to_keep=2",
        f"trainer.default_local_dir={work / 'checkpoints'}",
        "trainer.project_name=gpu-learning",
    ]
    if variant == VERL:
        tools = work / "tools.json"
        tools.write_text(json.dumps(TOOLS))
        codes = [payload["code"] for payload in training.payloads()]
        asked = (
            (question(code), code, {"tools_kwargs": {"look": {"create_kwargs": {"code": code}}}}) for code in codes
        )
        own += [
            *training.through_verls_loop(asked, "lock_tool.py"),
            *ORDERED,
            f"{rollout}.agent.default_agent_loop=tool_agent",
            f"{rollout}.multi_turn.enable=True",
            f"{rollout}.multi_turn.format=hermes",
            f"{rollout}.multi_turn.tool_config_path={tools}",
            f"{rollout}.multi_turn.max_assistant_turns={max_replies(codes[0])}",
        ]
        await training.run([*own, *more], {})
        return
    async with game.cloud(work) as cloud:
        settings = {**cloud.settings(), "output_dir": str(work / "runs"), "timeouts": TIMEOUTS}
        await training.run([*training.through_backend(settings), *own, *more], cloud.environ)


def result_of(variant: str, training: Training, with_rollouts: bool) -> dict[str, Any]:
    """Return what was found of a training until now. Reading its rollouts takes seconds."""
    logged = training.logged()
    load = (training.work / "load.jsonl").read_text().rpartition("\n")[0].splitlines()
    samples = [json.loads(line) for line in load]
    # Without the first step, which also loads and compiles.
    later = [sample for sample in samples if sample[0]]
    found: dict[str, Any] = {
        "variant": variant,
        "seed": 0,
        "right": [round(step["critic/score/mean"], 4) for step in logged],
        "step_s": [round(step["timing_s/step"], 3) for step in logged],
        "parts_s": averages(statistics.fmean, parts_of(logged[1:])),
        "tokens": [round(step["perf/total_num_tokens"]) for step in logged],
        "prob_diff": [step["training/rollout_probs_diff_mean"] for step in logged],
        "started": len(training.lives),
        "busy": round(statistics.fmean(sample[1] for sample in later), 1) if later else None,
        "mib": round(max(sample[2] for sample in samples)) if samples else None,
    }
    for folder in training.work.glob("runs/*/steps") if with_rollouts else ():
        archive = RunArchive(folder.parent)
        # A step that was interrupted has no report.
        reports = [report for step in archive.steps() if (report := archive.read_report(step))]
        rollouts = [
            archive.read_result(record)
            for step in archive.steps()
            for record in archive.read_records(step)
            if record.trained
        ]
        archive.close()
        counts = ("planned", "trainable", "attempts")
        found["rollouts"] = {name: sum(getattr(each, name) for each in reports) for name in counts}
        found["rollouts"]["one step"] = max((each.planned for each in reports), default=0)
        if rollouts:
            found["in play"] = {name: round(value, 3) for name, value in summary_of(rollouts).items()}
    return found


async def run(options: Any, size: Size, device: str) -> list[str]:
    """Return why trainings have failed."""
    work: Path = options.work.absolute()
    game, on_gpu = lock_of(size), device != "cpu"
    # What is missing on this machine ends the command here, and not when verl has started.
    packages = ("verl", "torch", "transformers", *(("sglang",) if on_gpu else ()))
    about = {
        "settings": {**asdict(size), "note": NOTE, "looks": LOOKS, "verl": options.verl},
        "device": ", driver ".join(ask_gpu("name", "driver_version")) if on_gpu else "the CPU",
        "versions": {name: version(name) for name in packages},
    }
    trainings = {}
    for variant in (OURS, VERL):
        trainings[variant] = Training(work / variant, work / "model", size.steps, on_gpu=on_gpu)
        trainings[variant].work.mkdir(parents=True, exist_ok=True)
    spent, failures, found = work / "seconds", list[str](), dict[str, Any]()
    before, began = float(spent.read_text()) if spent.exists() else 0.0, time.monotonic()

    def write() -> None:
        seconds = before + time.monotonic() - began
        spent.write_text(str(seconds))
        command = f".venv-verl/bin/python benchmarks/gpu_learning.py{' --smoke' if options.smoke else ''}"
        write_section(options.json, "gpu_learning", command, seconds, {**about, "runs": [*found.values()]})

    def note(variant: str, with_rollouts: bool) -> None:
        # The first step also loads and compiles, so it says nothing about the time of a step.
        if len(logged := trainings[variant].logged()) > 1:
            found[variant] = result_of(variant, trainings[variant], with_rollouts)
            print(variant, *(f"{step['critic/score/mean']:.2f}" for step in logged), flush=True)
        write()

    try:
        await prepare(work, size, game, device)
        for variant, training in trainings.items():
            tasks = game.tasks(0, size.prompts * (size.steps + 1))
            training.tasks.write_text("".join(json.dumps(task.as_row()) + "\n" for task in tasks))
            try:
                if len(training.logged()) < size.steps:
                    async with watched(training, device, partial(note, variant, False)):
                        await train(variant, training, size, game, options.verl)
            except SystemExit as error:  # verl has ended
                failures.append(f"{variant}: {error}")
                print(failures[-1], flush=True)
            finally:
                note(variant, True)
    finally:
        write()
    return failures


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/gpu_learning"), help="folder to continue from")
    parser.add_argument("--minutes", type=float, help="stop after this time")
    parser.add_argument("--verl", action="append", default=[], help="a setting of verl, for both trainings")
    options = parser.parse_args()
    size, device = (SMALL, "cpu") if options.smoke else (FULL, "cuda")

    async def limited() -> list[str]:
        async with asyncio.timeout(60 * options.minutes if options.minutes else None):
            return await run(options, size, device)

    try:
        sys.exit(bool(asyncio.run(limited())))
    except TimeoutError:
        sys.exit("stopped as asked: run the command again to continue")


if __name__ == "__main__":
    main()
