"""Qualify a machine for training: start an engine, check what training needs of it, and train two steps, in minutes.

    python examples/train_gpu/qualify.py                      # a small random model on one GPU
    python examples/train_gpu/qualify.py /models/Qwen3-0.6B -o serving.tensor_parallel=2
    python examples/train_gpu/qualify.py --folder logs --verl trainer.total_training_steps=5
    python examples/train_gpu/qualify.py -o serving.device=cpu -o serving.dtype=float32

The engine runs as verl runs its servers (without a tokenizer, and with memory that can be released), behind the
backend's own router and gateway. The two steps are those of sync.sh on one GPU, with an agent and a cloud on this
machine. Run it with the Python of verl's environment. The last page is what to send with a report. Exits with 1 if a
check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import math
import os
import platform
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp
import orjson

from agent_wrapper.contract import ModelEndpoint, Sampling, Segment
from agent_wrapper.shared.trajectory import fetch_trajectory
from rollout_backend.config import RolloutConfig, load_config
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.model.serving.local_engine import interpreter
from rollout_backend.model.serving.model_serving import ModelServing
from rollout_backend.model.serving.server_process import ServerProcess
from rollout_backend.testing.forward_pass import reference_logprobs
from rollout_backend.workbench.local.cloud import LocalCloud

SESSIONS = 8
LIMIT_S = 600.0
TRAINING_LIMIT_S = 1800.0
EXAMPLES = Path(__file__).parents[1]
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
# What differs from sync.sh: one GPU, two steps of eight sums, no checkpoint and no validation.
TWO_STEPS = [
    "data.train_batch_size=8",
    "data.max_prompt_length=96",
    "data.max_response_length=16",
    "data.dataloader_num_workers=0",
    f"{ROLLOUT}.n=4",
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ACTOR}.optim.lr=1e-3",  # large enough that old weights show
    f"{ACTOR}.entropy_coeff=0.01",  # a gradient, even if no answer is right
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=2",
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=1",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "trainer.resume_mode=disable",
    "trainer.project_name=qualify",
    "hydra.output_subdir=null",
]
WITHOUT_FLASH_ATTENTION = [
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.model.use_remove_padding=False",
    f"{ACTOR}.use_dynamic_bsz=False",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz=False",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
]
# What verl measures in a step.
PARTS = ["step", "gen", "old_log_prob", "update_actor", "update_weights"]
# verl's options of its servers that change how they behave.
VERL_ARGS = ["--skip-tokenizer-init", "--skip-server-warmup"]
VERL_GPU_ARGS = ["--enable-memory-saver", "--enable-weights-cpu-backup"]
# Limits of the average difference of probabilities, verl's training/rollout_probs_diff_mean. The reference is in
# float32. A random model of 142 million weights in bfloat16 had 0.006 to 0.022 on an H100, in training 6e-5 at most.
MEAN_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.02}
# The least correlation of these probabilities in training: those of a random model are small. On an H100 it was .9999
# with the trained weights, and -.25 with those of the step before.
CORRELATION = 0.99

_RANDOM = """
import sys; from pathlib import Path
from rollout_backend.workbench.local.tiny_model import make_tiny_model
make_tiny_model(Path(sys.argv[1]), **({} if sys.argv[2] == "cpu" else {"hidden": 1024, "heads": 16, "layers": 12}))
"""
_CHANGED = """
import shutil, sys; from pathlib import Path
from safetensors.torch import load_file, save_file
source, target = map(Path, sys.argv[1:])
shutil.copytree(source, target)
for file in target.glob("*.safetensors"):
    tensors = {name: tensor * 1.05 if tensor.dim() > 1 else tensor for name, tensor in load_file(file).items()}
    for name in tensors:
        if "embed_tokens" in name or "lm_head" in name:  # each token's neighbour takes its place, so old weights show
            tensors[name] = tensors[name].roll(1, 0)
    save_file(tensors, file, metadata={"format": "pt"})
"""
_VERSIONS = """
import importlib.metadata as packages, torch
print("GPU:", torch.cuda.get_device_name() if torch.cuda.is_available() else "none")
for name in ("torch", "sglang", "transformers", "verl"):
    try: print(name, packages.version(name))
    except packages.PackageNotFoundError: print(name, "is not installed")
"""


class Failed(Exception):
    """A check found something that training would suffer from."""


class Qualification:
    """The checks, in the order in which they run. Each returns its figures, or raises `Failed`."""

    def __init__(self, config: RolloutConfig, python: Path, folder: Path, verl: Sequence[str] = ()) -> None:
        self._config, self._python, self._folder, self._verl = config, python, folder, verl
        self._serving = ModelServing(config, folder)
        self._http: aiohttp.ClientSession
        self._models = {"0": config.model.path}

    async def run(self) -> list[tuple[str, bool, str]]:
        """Return a line for each check: its name, whether it passed, and its figures."""
        results: list[tuple[str, bool, str]] = []

        async def check(name: str, work: Callable[[], Awaitable[str]], limit_s: float = LIMIT_S) -> bool:
            began = time.monotonic()
            try:
                async with asyncio.timeout(limit_s):
                    passed, text = True, await work()
            except Exception as error:  # each is a finding
                passed, text = False, f"{type(error).__name__}: {error}"
            results.append((name, passed, f"{text} ({time.monotonic() - began:.1f} s)"))
            print(_line(*results[-1]), flush=True)
            return passed

        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as self._http:
            try:
                if await check("engine, router and gateway start", self._start):
                    await check("tokens and logprobs equal a forward pass", self._tokens)
                    await check("a long stream", self._stream)
                    await check("a stop string ends generation", self._stop)
                    await check("a client that leaves ends generation", self._abort)
                    await check("sleep and wake up under load", self._sleep)
                    await check("new weights under load", self._update)
                    await check("a killed engine under load", self._kill)
            finally:
                await self._serving.stop()
        await check("two steps of verl's trainer", self._train, TRAINING_LIMIT_S)
        return results

    async def _start(self) -> str:
        await self._serving.start(secrets.token_urlsafe(48))
        async with self._http.get(f"{self._engine}/model_info") as reply:
            version = (await reply.json()).get("weight_version")
        return f"the engine reports version {version} of its weights"

    async def _tokens(self) -> str:
        endpoints = [self._endpoint(max_tokens=64) for _ in range(SESSIONS)]
        await asyncio.gather(*(self._converse(endpoint) for endpoint in endpoints))
        segments = await self._segments(endpoints)
        for segment in segments:
            if len(segment.turns) != 2:
                raise Failed(f"a conversation of two calls became segments of {len(segment.turns)} calls")
        return await self._compare(segments)

    async def _stream(self) -> str:
        endpoint = self._endpoint(max_tokens=self._longest, temperature=0)
        pieces = size = 0
        began = time.monotonic()
        async for piece in self._chat(endpoint, "Write a long text.", stream=True):
            pieces, size = pieces + 1, size + len(piece)
        seconds = time.monotonic() - began
        [segment] = await self._segments([endpoint])
        tokens = segment.turns[0].end - segment.turns[0].start
        return f"{tokens} tokens in {pieces} pieces, {tokens / seconds:.0f} tokens/s"

    async def _stop(self) -> str:
        text = await self._text(self._endpoint(max_tokens=self._longest, temperature=0), "Tell me more.")
        stop = max(set(text), key=text.count)  # in bfloat16 the same prompt may get another reply
        reply = await self._text(
            self._endpoint(max_tokens=self._longest, temperature=0), "Tell me more.", stop=[stop]
        )
        if stop in reply or len(reply) >= len(text):
            raise Failed(f"a reply of {len(text)} characters has {len(reply)} with the stop string {stop!r}")
        return f"the engine is idle {await self._idle_after():.2f} s later"

    async def _abort(self) -> str:
        endpoint = self._endpoint(max_tokens=self._longest, temperature=0)
        async for _ in self._chat(endpoint, "Write a long text.", stream=True):
            break
        return f"the engine is idle {await self._idle_after():.2f} s later"

    async def _sleep(self) -> str:
        calls, endpoints = await self._load()
        before = await self._memory()
        await self._serving.pause()
        ended = sum(call.done() for call in calls)
        await self._post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
        asleep = await self._memory()
        async with self._http.get(f"{self._engine}/model_info") as reply:
            if reply.status != 200:
                raise Failed(f"a sleeping engine answers {reply.status} to /model_info")
        await asyncio.sleep(1)  # calls that arrived must not reach the sleeping engine
        if sum(call.done() for call in calls) > ended:
            raise Failed("a model call ended while the engine slept")
        await self._post("/resume_memory_occupation", {"tags": ["kv_cache", "weights"]})
        await self._serving.resume()
        await asyncio.gather(*calls)
        self._check_restarts(0)
        figures = await self._compare(await self._segments(endpoints))
        return f"{before} MiB of the GPU in use awake, {asleep} asleep; then {figures}"

    async def _update(self) -> str:
        changed = self._folder / "changed"
        await self._python_code(_CHANGED, str(self._config.model.path), str(changed))
        calls, endpoints = await self._load()
        update = await self._serving.update_weights(changed)
        if update.failed:
            raise Failed(f"the engine did not load new weights: {update.failed}")
        self._models[str(update.version)] = changed
        await asyncio.gather(*calls)
        self._check_restarts(0)
        return f"paused for {update.paused_s:.2f} s; {await self._compare(await self._segments(endpoints))}"

    async def _kill(self) -> str:
        calls, endpoints = await self._load()
        os.kill(_pid_of(self._engine), signal.SIGKILL)
        await asyncio.gather(*calls)
        self._check_restarts(1)
        return await self._compare(await self._segments(endpoints))

    async def _train(self) -> str:
        folder, on_cpu = self._folder / "training", self._config.serving.device == "cpu"
        tasks, backend, metrics = folder / "tasks.jsonl", folder / "backend.yaml", folder / "metrics.jsonl"
        sums = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(16)]
        folder.mkdir()
        tasks.write_text("".join(json.dumps({"payload": each}) + "\n" for each in sums))
        arguments = [*TWO_STEPS, f"{ROLLOUT}.dtype={self._config.serving.dtype}", f"hydra.run.dir={folder}"]
        environ = dict(os.environ)
        if on_cpu:
            sys.path.insert(0, str(EXAMPLES / "train_arithmetic"))
            from verl_cpu.environment import environment, overrides

            arguments += [*overrides(), f"+{ROLLOUT}.engine_kwargs.sglang_cpu={{log_dir: {folder}}}"]
            environ = environment()
        elif importlib.util.find_spec("flash_attn") is None:
            arguments += WITHOUT_FLASH_ATTENTION
        async with LocalCloud(EXAMPLES / "arithmetic" / "agent.py", run_dir=folder / "cloud") as cloud:
            backend.write_text(json.dumps({**cloud.settings(), "output_dir": str(folder / "runs")}))
            environ |= cloud.environ | {
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # for python3 of sync.sh
                "MODEL": str(self._config.model.path),
                "BACKEND": str(backend),
                "TRAIN": str(tasks),
                "VAL": str(tasks),
                "VERL_FILE_LOGGER_PATH": str(metrics),
            }
            command = ["bash", str(Path(__file__).with_name("sync.sh")), *arguments, *self._verl]
            verl = ServerProcess("verl", command, folder / "verl.log", environ)
            await verl.start()
            try:
                code = await verl.wait()
            finally:
                await verl.stop(grace_s=20)
        if code:
            raise Failed(f"verl ended with code {code}. {verl.log_tail()}")
        steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
        means = [step["training/rollout_probs_diff_mean"] for step in steps]
        correlations = [step["training/rollout_actor_probs_pearson_corr"] for step in steps]
        text = ", ".join(
            f"step {number}: probabilities differ by {step['training/rollout_probs_diff_mean']:.1e} on average, "
            f"{step['training/rollout_probs_diff_max']:.1e} at most, correlation "
            f"{step['training/rollout_actor_probs_pearson_corr']:.5f}, gradient norm {step['actor/grad_norm']:.1e}, "
            f"{step['rollouts/trained/sum']:.0f} of {step['rollouts/planned/sum']:.0f} rollouts trained, "
            + "; ".join(f"{part} {step[f'timing_s/{part}']:.1f} s" for part in PARTS if f"timing_s/{part}" in step)
            for number, step in enumerate(steps, start=1)
        )
        limit = MEAN_DIFFERENCE[self._config.serving.dtype]
        agree = len(steps) >= 2 and max(means) <= limit and min(correlations) >= CORRELATION
        if not agree or any(step["rollouts/left_out/sum"] for step in steps):
            raise Failed(
                f"{text}; expected two steps with averages up to {limit:g}, correlations from {CORRELATION:g}, and "
                "every rollout trained"
            )
        return text

    # --- helpers ----------------------------------------------------------------------------------------------

    @property
    def _engine(self) -> str:
        return next(server.url for server in self._serving.engines.snapshot() if server.name == "engine-0")

    @property
    def _longest(self) -> int:
        return self._config.model.context_tokens - 128

    def _check_restarts(self, expected: int) -> None:
        restarts = sum(server.restarts for server in self._serving.engines.snapshot())
        if restarts != expected:
            raise Failed(f"servers were restarted {restarts} times, expected {expected}")

    def _endpoint(self, *, max_tokens: int, temperature: float = 1.0) -> ModelEndpoint:
        claims = SessionClaims(
            run_id=self._config.run_id,
            step=0,
            rollout_id="qualify",
            attempt=1,
            session_id=f"qualify-{secrets.token_hex(16)}",
            sampling=Sampling(temperature=temperature, max_tokens=max_tokens),
            expires_at=time.time() + 2 * LIMIT_S,
        )
        return self._serving.gateways.endpoint(claims)

    async def _chat(
        self, endpoint: ModelEndpoint, text: str | list[dict[str, str]], **more: object
    ) -> AsyncIterator[bytes]:
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        while True:
            async with self._http.post(
                f"{endpoint.base_url}/chat/completions",
                json={"model": endpoint.name, "messages": messages, **more},
                headers={"Authorization": f"Bearer {endpoint.api_key}"},
            ) as reply:
                if reply.status == 200:
                    if more.get("stream"):
                        async for line in reply.content:
                            if line.startswith(b"data: {"):
                                yield line
                    else:
                        yield await reply.read()
                    return
                if reply.status != 503:
                    raise Failed(f"a model call was answered {reply.status}: {(await reply.text())[:300]}")
            await asyncio.sleep(1)  # the engine starts again; agents' clients retry as well

    async def _text(self, endpoint: ModelEndpoint, text: str | list[dict[str, str]], **more: object) -> str:
        [body] = [body async for body in self._chat(endpoint, text, **more)]
        return str(orjson.loads(body)["choices"][0]["message"]["content"] or "")

    async def _converse(self, endpoint: ModelEndpoint) -> None:
        first = {"role": "user", "content": "Count from one to ten."}
        answer = {"role": "assistant", "content": await self._text(endpoint, [first])}
        await self._text(endpoint, [first, answer, {"role": "user", "content": "Go on."}])

    async def _load(self) -> tuple[list[asyncio.Task[str]], list[ModelEndpoint]]:
        """Start long calls, and return once tokens are sampled."""
        endpoints = [self._endpoint(max_tokens=self._longest, temperature=0) for _ in range(SESSIONS)]
        texts = [f"Write a long text about the number {i}." for i in range(SESSIONS)]
        calls = [
            asyncio.create_task(self._text(endpoint, text)) for endpoint, text in zip(endpoints, texts, strict=True)
        ]
        async for _ in self._chat(self._endpoint(max_tokens=32), "Begin.", stream=True):
            break
        return calls, endpoints

    async def _segments(self, endpoints: Sequence[ModelEndpoint]) -> list[Segment]:
        trajectories = await asyncio.gather(*(fetch_trajectory(endpoint, 60) for endpoint in endpoints))
        return [segment for trajectory in trajectories for segment in trajectory.segments]

    async def _compare(self, segments: Sequence[Segment]) -> str:
        """Compare the logprob of each sampled token with that of a forward pass of the weights that sampled it.

        Tokens of new weights must differ more from the weights before, or an engine that kept those could pass.
        """
        differences: list[float] = []
        of_newest: dict[str, list[float]] = {}  # differences of the newest version's tokens, by reference
        newest = [*self._models][-1]
        sequences = [list(segment.token_ids) for segment in segments]
        for version, model in self._models.items():
            reference = await asyncio.to_thread(reference_logprobs, self._python, model, sequences)
            for segment, expected in zip(segments, reference, strict=True):
                for turn in segment.turns:
                    if sum(span.end - span.start for span in turn.weight_versions) != turn.end - turn.start:
                        raise Failed("tokens without a weight version")
                    for span in turn.weight_versions:
                        found = [
                            abs(math.exp(segment.logprobs[i]) - math.exp(expected[i]))
                            for i in range(span.start, span.end)
                        ]
                        if span.version == version:
                            differences += found
                        if span.version == newest:
                            of_newest.setdefault(version, []).extend(found)
        sampled = sum(sum(segment.response_mask) for segment in segments)
        if len(differences) != sampled or any(math.isnan(each) for each in differences):
            raise Failed(f"{sampled} tokens were sampled, {len(differences)} have a logprob and a known version")
        mean, limit = sum(differences) / sampled, MEAN_DIFFERENCE[self._config.serving.dtype]
        versions = sorted({span.version for each in segments for turn in each.turns for span in turn.weight_versions})
        text = f"{sampled} tokens of weights {', '.join(versions)}: probabilities differ by {mean:.1e} on average"
        text += f", {max(differences):.1e} at most"
        if not mean <= limit:
            raise Failed(f"{text}; the limit of the average is {limit:g}")
        if not of_newest:
            raise Failed(f"{text}; no token of weights {newest} was sampled: all calls ended before. Run it again")
        own, *others = (sum(of_newest[version]) / len(of_newest[version]) for version in reversed(self._models))
        if others:
            text += f"; those of weights {newest} by {own:.1e}, and by {min(others):.1e} from the weights before"
            if own > min(others) / 2:
                raise Failed(f"{text}: at least twice as much is expected, so these may be the old weights")
        return text

    async def _idle_after(self) -> float:
        """Return how long the engine is still busy: `/flush_cache` fails until its scheduler is idle."""
        began = time.monotonic()
        while True:
            async with self._http.post(f"{self._engine}/flush_cache") as reply:
                if reply.status == 200:
                    return time.monotonic() - began
            await asyncio.sleep(0.02)

    async def _post(self, path: str, body: object) -> None:
        async with self._http.post(self._engine + path, json=body) as reply:
            if reply.status != 200:
                raise Failed(f"the engine answers {reply.status} to {path}: {(await reply.text())[:300]}")

    async def _memory(self) -> str:
        """Return the MiB in use of the first GPU."""
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        try:
            done = await asyncio.to_thread(subprocess.run, query, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return "unknown"
        return done.stdout.split()[0]

    async def _python_code(self, code: str, *arguments: str) -> str:
        return await asyncio.to_thread(run_python, self._python, code, *arguments)


def run_python(python: Path, code: str, *arguments: str) -> str:
    """Run code in the engine's environment, which has torch, and return what it prints."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [str(python), "-c", code, *arguments], env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def _pid_of(url: str) -> int:
    """Return the process of the server on this machine that listens on the URL's port."""
    port = url.rpartition(":")[2].encode()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if b"--port" in words and words[words.index(b"--port") + 1] == port and b"--model-path" in words:
            return int(file.parent.name)
    raise Failed(f"no process of {url} was found")


def _line(name: str, passed: bool, text: str) -> str:
    return f"{'ok' if passed else 'FAILED':7}{name}: {text}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="model folder; by default a small random model")
    parser.add_argument("-o", "--override", action="append", default=[], help="a setting, such as serving.python=...")
    parser.add_argument("--verl", action="append", default=[], help="a setting of verl, for the two steps")
    parser.add_argument("--folder", type=Path, help="new folder for logs and metrics, which are otherwise deleted")
    given = parser.parse_args()
    if given.folder is not None and given.folder.exists():
        parser.error(
            f"--folder {given.folder} exists, and what an earlier run left there would fail checks: name a new one"
        )
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qualify-")))
        folder.mkdir(parents=True, exist_ok=True)
        base = {
            "run_id": "qualify",
            "output_dir": folder,
            "model": {"path": given.model or folder / "model"},
            "storage": {"bucket": "unused"},
            "runtime": {"kind": "process", "command": ["true"]},
        }
        config = load_config(base=base, overrides=given.override)
        device_args = [] if config.serving.device == "cpu" else VERL_GPU_ARGS
        args = (*VERL_ARGS, *device_args, *config.serving.extra_args)
        config = config.model_copy(
            update={"serving": config.serving.model_copy(update={"servers": 1, "extra_args": args})}
        )
        python = interpreter(config.serving)
        if given.model is None:
            run_python(python, _RANDOM, str(config.model.path), config.serving.device)
        results = asyncio.run(Qualification(config, python, folder, given.verl).run())
        print("\nReport this page, and with a failure the logs that it names (keep them with --folder):\n")
        print(f"{platform.platform()}, Python {platform.python_version()}")
        print(run_python(python, _VERSIONS), end="")
        print(f"model: {given.model or 'random'}, {config.serving.dtype}, extra_args: {' '.join(args)}")
        for result in results:
            print(_line(*result))
        print("not checked: several GPUs")
    return 0 if all(passed for _, passed, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
