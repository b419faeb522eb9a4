"""Train one small model on a task with a tool, with verl's own tool loop and through the whole backend, on one GPU.

    make learn-gpu
    .venv-verl/bin/python benchmarks/gpu_learning.py --minutes 9.5 --json runs/results/gpu_learning.json
    .venv-verl/bin/python benchmarks/gpu_learning.py --smoke            # the same at small size, on the CPU

The task is `games/lock.py`. Everything is real except the cloud, which is on this machine: verl's v1 trainer, SGLang,
the router, the gateway and a process for each agent; S3, SQS and AgentCore are emulated. Nothing is downloaded: the
model is made here, and first fitted to what a weak player does in the same agents.

The command may be stopped at any time, and `--minutes` stops it. Run it again to continue: a finished part is not
repeated, and a training continues from its last checkpoint. `--json` always has what was found until then.
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
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil  # verl needs it, too
from common import HERE, arguments, write_section
from games.lock import LOOK, NOTE, max_replies, question
from many_turns import TIMEOUTS, Game, play, summary_of
from tiny_learner import Row, fit
from verl_training import ORDERED, Training, averages, batch_overrides, parts_of

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
    digits=4, hidden=512, layers=8, heads=8, transcripts=1024, fit_steps=1500, fit_rate=5e-4,
    prompts=32, group=8, rows_at_once=32, steps=30, save_every=5, learning_rate=3e-5,
)  # fmt: skip
SMALL = Size(
    digits=2, hidden=64, layers=2, heads=4, transcripts=48, fit_steps=20, fit_rate=3e-3,
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
        played = await play(game, work / "player", size.transcripts)
        rows: list[Row] = [(list(s.token_ids), list(s.response_mask)) for each in played for s in each.segments]
        await asyncio.to_thread(fit, unfitted, rows, size.fit_steps, device=device, learning_rate=size.fit_rate)
        unfitted.rename(model)
    return model


# --- what the machine does --------------------------------------------------------------------------------


def load_of(device: str) -> tuple[float, float]:
    """Return how busy the GPU, or the CPU, is in percent, and the MiB in use."""
    if device == "cpu":
        return psutil.cpu_percent(), psutil.virtual_memory().used / 2**20
    query = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    busy, used = map(float, found.split(","))
    return busy, used


@contextlib.asynccontextmanager
async def watched(training: Training, device: str) -> AsyncIterator[None]:
    """Append a line each second to `load.jsonl`: the steps logged until then, how busy the device is, MiB in use."""

    async def watch() -> None:
        with (training.work / "load.jsonl").open("a") as file:
            while True:
                line = [len(training.logged()), *await asyncio.to_thread(load_of, device)]
                print(json.dumps(line), file=file, flush=True)
                await asyncio.sleep(1)

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        yield
        watching.cancel()


# --- the trainings ----------------------------------------------------------------------------------------


async def train(variant: str, training: Training, size: Size, game: Lock, device: str) -> None:
    """Train to the last step, or continue after the last checkpoint."""
    work, rollout = training.work, "actor_rollout_ref.rollout"
    own = [
        *batch_overrides(
            size.prompts, size.group, size.rows_at_once, size.prompts, size.response_tokens, size.learning_rate
        ),
        f"data.max_prompt_length={size.prompt_tokens}",
        f"trainer.save_freq={size.save_every}",
        "trainer.resume_mode=auto",
        "trainer.max_actor_ckpt_to_keep=1",
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
        async with watched(training, device):
            await training.run(own, {})
        return
    async with game.cloud(work) as cloud, watched(training, device):
        settings = {**cloud.settings(), "output_dir": str(work / "runs"), "timeouts": TIMEOUTS}
        await training.run([*training.through_backend(settings), *own], cloud.environ)


def result_of(variant: str, training: Training) -> dict[str, Any]:
    """Return what was found of a training until now."""
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
    for folder in training.work.glob("runs/*/steps"):
        archive = RunArchive(folder.parent)
        reports = [archive.read_report(step) for step in archive.steps()]
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


async def run(options: Any, size: Size, device: str) -> None:
    work: Path = options.work.absolute()
    game = lock_of(size)
    trainings = {}
    for variant in (VERL, OURS):
        trainings[variant] = Training(work / variant, work / "model", size.steps, on_gpu=device != "cpu")
        trainings[variant].work.mkdir(parents=True, exist_ok=True)
    spent = work / "seconds"
    before, began = float(spent.read_text()) if spent.exists() else 0.0, time.monotonic()

    def write() -> None:
        seconds = before + time.monotonic() - began
        spent.write_text(str(seconds))
        done = [result_of(variant, training) for variant, training in trainings.items() if training.logged()]
        about = {"settings": {**asdict(size), "note": NOTE, "looks": LOOKS}, "device": device_name(device)}
        versions = {name: version(name) for name in ("verl", "torch", "transformers")}
        command = f".venv-verl/bin/python benchmarks/gpu_learning.py{' --smoke' if options.smoke else ''}"
        write_section(options.json, "gpu_learning", command, seconds, {**about, "versions": versions, "runs": done})

    try:
        await prepare(work, size, game, device)
        for variant, training in trainings.items():
            if len(training.logged()) < size.steps:
                tasks = game.tasks(0, size.prompts * (size.steps + 1))
                training.tasks.write_text("".join(json.dumps(task.as_row()) + "\n" for task in tasks))
                await train(variant, training, size, game, device)
            print(variant, *(f"{step['critic/score/mean']:.2f}" for step in training.logged()), flush=True)
    finally:
        write()


def device_name(device: str) -> str:
    if device == "cpu":
        return "the CPU"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/gpu_learning"), help="folder to continue from")
    parser.add_argument("--minutes", type=float, help="stop after this time")
    options = parser.parse_args()
    size, device = (SMALL, "cpu") if options.smoke else (FULL, "cuda")

    async def limited() -> None:
        async with asyncio.timeout(60 * options.minutes if options.minutes else None):
            await run(options, size, device)

    try:
        asyncio.run(limited())
    except TimeoutError:
        sys.exit("stopped as asked: run the command again to continue")


if __name__ == "__main__":
    main()
