"""`rollout train`, whole: agents in their own process, the gateway, S3 and SQS, and an emulated service."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from anyio.from_thread import start_blocking_portal
from tokenizers import Tokenizer

from agent_servers import serve_agent
from agent_wrapper.contract import Rollout
from rollout_backend.workbench.local.cloud import LocalStorage
from rollout_backend.workbench.local.scripted import BYTE_MODEL
from tests.emulators.sagemaker_emulator import GROUP as PACKAGES
from tests.emulators.sagemaker_emulator import MODEL, ROLE, SageMakerEmulator
from tests.emulators.tinker_emulator import Sample, TinkerEmulator
from tests.emulators.tinker_training import EmulatedTrainer
from tests.emulators.tiny_learner import TabularPolicy, TrainedDatum

AGENT = '''
"""An agent that is rewarded for each letter a of its model's reply."""

from openai import AsyncOpenAI

from agent_wrapper import RolloutApp, RolloutContext

app = RolloutApp()


@app.entrypoint
async def agent(context: RolloutContext) -> dict[str, object]:
    async with AsyncOpenAI(**context.openai_kwargs()) as client:
        messages = [{"role": "user", "content": str(context.payload["question"])}]
        reply = await client.chat.completions.create(model=context.model, messages=messages)
    text = reply.choices[0].message.content or ""
    return {"reward": text.count("a") / 4}


if __name__ == "__main__":
    app.run()
'''
STEPS, GROUP, REPLY = 4, 8, 4


def untrained() -> TabularPolicy:
    vocabulary = Tokenizer.from_file(str(BYTE_MODEL / "tokenizer.json")).encode("abcd").ids
    return TabularPolicy(vocabulary, np.zeros((5, 4)))


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[TinkerEmulator]:
    """The service, in a thread: each command has its own event loop."""
    service = TinkerEmulator({"tiny": untrained()}, poll_s=0.2)
    monkeypatch.setenv("TINKER_API_KEY", service.key)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(service):
        yield service


@dataclass(frozen=True)
class Service:
    """A training service of one kind, and what it did."""

    section: dict[str, Any]
    """The settings of `training_service`."""
    samples: list[Sample]
    data: list[TrainedDatum]
    history: Callable[[], Sequence[object]]
    """Returns the optimizer steps of the newest checkpoint."""
    version: Callable[[str], int]
    """Returns the step that has trained the weights at a path."""
    failing: Callable[[], object]
    """Lets the next sample fail."""
    printed: tuple[str, ...] = ()
    """Metrics that each step prints."""


@pytest.fixture(params=["tinker", "sagemaker"])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    if request.param == "tinker":
        emulator = request.getfixturevalue("emulator")
        trainer = EmulatedTrainer(emulator)
        section = {"base_url": emulator.url, "base_model": "tiny", "learning_rate": 0.6}
        yield Service(
            section,
            emulator.samples,
            trainer.data,
            history=lambda: trainer.history([*trainer.states][-1]),
            version=lambda path: int(path[-6:]),
            failing=lambda: emulator.faults.failures.append("server"),
        )
        return
    # The service accepts learning rates up to 0.01.
    sessions = SageMakerEmulator({MODEL: untrained()}, rate_scale=60)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(sessions):
        sagemaker = {"role_arn": ROLE, "model_package_group_arn": PACKAGES, "output": "s3://bucket/checkpoints"}
        section = {"base_url": sessions.url, "base_model": MODEL, "learning_rate": 0.01, "sagemaker": sagemaker}
        yield Service(
            {"kind": "sagemaker", **section},
            sessions.samples,
            sessions.data,
            history=lambda: sessions.history([*sessions.states][-1]),
            version=lambda path: [*sessions.saved].index(path),
            failing=lambda: sessions.faults.failing.update(sample=["a node is lost"]),
            printed=("billed_prefill_tokens", "billed_sample_tokens", "billed_training_tokens"),
        )
    assert not any(session.status in ("Running", "Blocked") for session in sessions.sessions.values())


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    made = []
    for name, count in (("tasks", 4), ("held-out", 1)):
        lines = [json.dumps({"task_id": f"{name}-{i}", "payload": {"question": f"Say {i}"}}) for i in range(count)]
        made.append(tmp_path / f"{name}.jsonl")
        made[-1].write_text("".join(f"{line}\n" for line in lines))
    return made[0], made[1]


@pytest.mark.slow
def test_a_training_raises_the_reward_resumes_and_shows_its_curve(
    rollout, settings, files, here, storage: LocalStorage, service: Service, run_id: str
) -> None:
    agent = here / "agent.py"
    agent.write_text(AGENT)
    section = {**service.section, "rank": 8, "tasks_per_step": 2}
    with serve_agent(agent, storage, here / "agent") as url:
        config = settings(
            runtime={"kind": "http", "url": url},
            queue={"wait_s": 1},
            run_id=run_id,
            output_dir="runs",
            sampling={"max_tokens": REPLY, "seed": 7},
            group={"size": GROUP},
            training_service={**section, "steps": STEPS - 2, "evaluate_every": 2},
            model={"path": str(BYTE_MODEL), "renderer": "chatml"},
        )
        command = ("train", config, "--tasks", files[0], "--held-out", files[1])
        code, output = rollout(*command)
        assert code == 0, output
        assert f"trained {STEPS - 2} steps: weights " in output
        assert all(name in output for name in service.printed)
        optimizer_steps = len(service.history())
        code, output = rollout(*command, "-o", f"training_service.steps={STEPS}")
        assert code == 0, output
        assert "step 1 of" not in output
        assert f"step {STEPS} of {STEPS}: reward" in output
    assert len(service.history()) == STEPS > optimizer_steps
    # Every trained token is one that the service sampled, with its logprob, and each token names its weights.
    sampled = {
        ((*each.prompt, *each.tokens[:REPLY]), each.logprobs[:REPLY]): each.model_path for each in service.samples
    }
    folder, rewards = here / "runs" / run_id, {}
    for place in sorted((folder / "rollouts").iterdir()):
        found = [Rollout.decode(path.read_bytes()) for path in place.iterdir() if "~" not in path.name]
        rewards[int(place.name)] = [each.reward for each in found]
        for each in found:
            [segment] = each.segments
            logprobs = tuple(
                value for value, is_sampled in zip(segment.logprobs, segment.response_mask, strict=True) if is_sampled
            )
            path = sampled[tuple(segment.token_ids), logprobs]
            [span] = segment.turns[0].weight_versions
            assert service.version(path) == int(span.version)
    means = [float(np.mean(rewards[step])) for step in sorted(rewards) if len(rewards[step]) == 2 * GROUP]
    assert len(means) == STEPS
    assert means[-1] > means[0] + 0.2
    for datum in service.data:
        text = (*datum.tokens, int(datum.inputs["target_tokens"][-1]))
        is_sampled = datum.inputs["advantages"] != 0
        assert (text, tuple(datum.inputs["logprobs"][is_sampled].tolist())) in sampled
    reports = [json.loads(path.read_text()) for path in (folder / "steps").glob("*.json")]
    # A step for each training step, and evaluations before, between and after them.
    assert [(each["engine_use"], each["given_up_calls"]) for each in reports] == [(None, {})] * (STEPS + 3)
    code, output = rollout("show", "--run", run_id)
    assert code == 0, output
    assert "0 validation" in output
    assert (folder / "report" / "index.html").exists() or (folder / "report.html").exists(), [*folder.iterdir()]


@pytest.mark.slow
def test_a_run_samples_from_a_service_without_an_engine(
    rollout, settings, files, here, storage: LocalStorage, service: Service, run_id: str
) -> None:
    agent = here / "agent.py"
    agent.write_text(AGENT)
    with serve_agent(agent, storage, here / "agent") as url:
        config = settings(
            runtime={"kind": "http", "url": url},
            queue={"wait_s": 1},
            run_id=run_id,
            output_dir="runs",
            sampling={"max_tokens": REPLY},
            group={"size": 2},
            serving={"kind": "tinker"},
            training_service=service.section,
            model={"path": str(BYTE_MODEL), "renderer": "chatml"},
        )
        service.failing()
        code, output = rollout("run", config, "--tasks", files[0])
    assert code == 0, output
    sampled = {((*each.prompt, *each.tokens[:REPLY]), each.logprobs[:REPLY]) for each in service.samples}
    assert len({each.model_path for each in service.samples}) == 1
    rollouts = [
        Rollout.decode(path.read_bytes())
        for path in (here / "runs" / run_id / "rollouts").glob("*/*")
        if "~" not in path.name
    ]
    assert len(rollouts) == 8
    for each in rollouts:
        [segment] = each.segments
        logprobs = tuple(
            value for value, is_sampled in zip(segment.logprobs, segment.response_mask, strict=True) if is_sampled
        )
        assert (tuple(segment.token_ids), logprobs) in sampled


def test_what_a_training_lacks_is_named_before_anything_starts(rollout, settings, files, emulator) -> None:
    section = {"base_url": emulator.url, "base_model": "tiny", "tasks_per_step": 2}
    cases = [
        ({}, "the section training_service is missing"),
        ({"training_service": section, "gateway": {"constrained_decoding": "allow"}}, "forces no format"),
        ({"training_service": section, "gateway": {"max_images": 1}}, "is sent no images"),
        ({"training_service": section}, "group.size is 1"),
        ({"training_service": {**section, "base_model": "large"}, "group": {"size": 2}}, "It trains: tiny"),
        ({"training_service": {**section, "tasks_per_step": 9}, "group": {"size": 2}}, "there are 4 tasks"),
    ]
    for sections, message in cases:
        code, output = rollout("train", settings(**sections), "--tasks", files[0])
        assert code == 2, output
        assert message in output
        assert "starting" not in output


def test_the_check_of_a_training_asks_the_service_and_no_engine(rollout, settings, files, emulator) -> None:
    section = {"base_url": emulator.url, "base_model": "large", "tasks_per_step": 2}
    path = settings(training_service=section, group={"size": 2})
    written = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({name: value for name, value in written.items() if name != "serving"}))
    found = {each["id"]: each for each in json.loads(rollout("doctor", path, "--tasks", files[0], "--json")[1])}
    assert "It trains: tiny" in found["training_service"]["text"]
    assert [name for name, each in found.items() if name.startswith("serving.") and each["level"] != "ok"] == []
    assert "4 rollouts" in found["runtime.invoke_per_s"]["text"]
    code, output = rollout("doctor", path, "--engine")
    assert (code, "rollout train starts no engine" in output) == (2, True)
    code, output = rollout("doctor", path, "-o", "gateway.constrained_decoding=allow")
    assert (code, "forces no format" in output) == (2, True)
