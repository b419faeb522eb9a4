"""Export a run as logs of Inspect (https://inspect.aisi.org.uk), for `inspect view` and its Python API.

Each step becomes a log, each task a sample, and the rollouts of a task its epochs.

Invariants:

- A missing reward is a missing score, never a score of 0.
- Only the results of one step are in memory at a time.
- The logs of an earlier export are replaced once all new ones are complete. A failed export leaves no logs.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inspect_ai.event import Event, ModelEvent, SpanBeginEvent, SpanEndEvent
from inspect_ai.log import (
    EvalConfig,
    EvalDataset,
    EvalError,
    EvalLog,
    EvalMetric,
    EvalResults,
    EvalRevision,
    EvalSample,
    EvalScore,
    EvalSpec,
    EvalStats,
    write_eval_log,
)
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    Content,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    ModelOutput,
    ModelUsage,
)
from inspect_ai.scorer import Score
from inspect_ai.tool import ToolCall

from agent_wrapper.contract import Outcome, Rollout, Turn
from rollout_backend.errors import ConfigError
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.accounts.records import ResultSummary, RolloutRecord, replies_by_turn, text_of
from rollout_backend.run.accounts.run_info import RunStart
from rollout_backend.run.accounts.summary import StepSummary, duration
from rollout_backend.views.run_data import RunData, StepData, changed_settings, last_start, read_rollout, read_run

_REWARD = "reward"
_STOPS = {"length": "max_tokens", "tool_calls": "tool_calls"}


def export_inspect_logs(run_dir: Path, out: Path) -> dict[Path, int]:
    """Write a log for each step of a run into a folder. Return the number of samples in each.

    Raises:
        ConfigError: the run's folder holds no step, or a file of another version.
        OSError: the disk refuses a file.
    """
    run, archive = read_run(run_dir), RunArchive(run_dir)
    start = last_start(archive)
    out.mkdir(parents=True, exist_ok=True)
    written = {}
    with tempfile.TemporaryDirectory(prefix=".export-", dir=out) as folder:
        for step in run.steps:
            log = _Step(run, archive, step, start).log()
            # The name that Inspect expects of a log that it lists.
            time, task = log.eval.created.replace(":", "-").replace("+", "-"), re.sub("[_ ]", "-", log.eval.task)
            part = Path(folder) / f"{time}_{task}_{log.eval.task_id}.eval"
            write_eval_log(log, part)
            written[part] = step.summary.planned
        for part in written:
            key = part.stem.rpartition("_")[2]
            # The log of an earlier execution has another time in its name.
            for earlier in out.glob(f"*_{key}.eval"):
                earlier.unlink()
        return {part.replace(out / part.name): samples for part, samples in written.items()}


class _Step:
    """One step, as a log."""

    def __init__(self, run: RunData, archive: RunArchive, step: StepData, start: RunStart | None) -> None:
        self._run, self._archive, self._step, self._start = run, archive, step, start
        self._records = step.read_records()
        self._model = run.config.model.served_name if run.config is not None else "unknown"

    def log(self) -> EvalLog:
        step, summary = self._step, self._step.summary
        usage = _usage_of(record.result for record in self._records if record.result is not None)
        return EvalLog(
            status="success" if step.overview.has_report else "cancelled",
            eval=self._spec(summary),
            results=_results(summary),
            stats=EvalStats(
                started_at=_time(summary.began), completed_at=_time(summary.ended), model_usage={self._model: usage}
            ),
            samples=list(self._samples()),
        )

    def _spec(self, summary: StepSummary) -> EvalSpec:
        run, step, start = self._run, self._step, self._start
        # A repeated export has the same key.
        key = uuid.uuid5(uuid.NAMESPACE_URL, f"{run.run_id}/{step.step}").hex[:22]
        per_task = Counter(record.task_id for record in self._records)
        sampling = run.config.sampling if run.config is not None else None
        return EvalSpec(
            eval_id=key,
            run_id=run.run_id,
            created=_time(summary.began, "seconds"),
            task=f"{run.run_id} step {step.name}",
            task_id=key,
            dataset=EvalDataset(name=run.run_id, samples=len(per_task), sample_ids=[*per_task]),
            model=self._model,
            model_generate_config=GenerateConfig(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k if sampling.top_k > 0 else None,
                seed=sampling.seed,
            )
            if sampling is not None
            else GenerateConfig(),
            config=EvalConfig(
                epochs=max(Counter(record.task_id for record in self._records).values()), epochs_reducer=["mean"]
            ),
            revision=EvalRevision(
                type="git",
                origin="",
                commit=start.commit.removesuffix("-dirty"),
                dirty=start.commit.endswith("-dirty"),
            )
            if start is not None and start.commit
            else None,
            packages=dict(start.versions) if start is not None else {},
            metadata={
                "run_id": run.run_id,
                "step": step.step,
                "validates": step.validates,
                "agent": dict(start.agent) if start is not None else {},
                "settings": dict(changed_settings(run.config)) if run.config is not None else {},
            },
        )

    def _samples(self) -> Iterator[EvalSample]:
        tasks, epochs = dict[str, dict[str, Any]](), Counter[str]()
        # Without the tasks, the logs lack payloads.
        with contextlib.suppress(ConfigError):
            tasks = self._archive.read_tasks(self._step.step)
        for record in self._records:
            epochs[record.task_id] += 1
            rollout = read_rollout(self._archive, record)
            task = tasks.get(record.task_id)
            payload = json.dumps(task["payload"], ensure_ascii=False) if task is not None else ""
            yield self._sample(record, rollout, epochs[record.task_id], payload)

    def _sample(self, record: RolloutRecord, rollout: Rollout | None, epoch: int, payload: str) -> EvalSample:
        began = record.invoked_at if record.invoked_at is not None else record.planned_at
        conversations = list(_conversations(rollout)) if rollout is not None else []
        main = max(
            conversations, key=lambda conversation: len(conversation.messages), default=_Conversation("", [], {})
        )
        events = [
            event
            for number, conversation in enumerate(conversations)
            for event in self._events(conversation, number, began)
        ]
        outputs = [event.output for event in events if isinstance(event, ModelEvent)]
        first = min(main.replies, default=len(main.messages))
        return EvalSample(
            id=record.task_id,
            epoch=epoch,
            input=main.messages[:first] or payload,
            target="",
            messages=main.messages,
            output=outputs[-1] if outputs else ModelOutput(model=self._model),
            scores={_REWARD: Score(value=record.reward, metadata=dict(rollout.extras) if rollout else None)}
            if record.reward is not None
            else None,
            metadata={
                "run_id": self._run.run_id,
                **record.model_dump(
                    mode="json",
                    include={
                        "step", "rollout_id", "outcome", "reason", "trainable", "group_usable", "is_replacement",
                        "attempts", "session_ids", "log",
                    },
                ),
            },
            events=events,
            model_usage={self._model: _usage_of([record.result])} if record.result is not None else {},
            started_at=_time(began),
            completed_at=_time(record.settled_at) if record.settled_at is not None else None,
            total_time=duration(record),
            working_time=record.result.agent_s if record.result is not None else None,
            uuid=f"{self._run.run_id}/{record.step}/{record.rollout_id}",
            error=_error(record, rollout),
            turn_count=record.result.turns if record.result is not None else None,
        )  # fmt: skip

    def _events(self, conversation: _Conversation, number: int, began: float) -> Iterator[Event]:
        """Yield a conversation's model calls one after another, because a result does not record when each began."""
        at, name = began, f"conversation {number}: {conversation.name}"
        yield SpanBeginEvent(id=str(number), span_id=str(number), name=name, working_start=0.0, timestamp=_at(at))
        for place, turn in conversation.replies.items():
            reply, took = conversation.messages[place], turn.seconds if turn is not None else 0.0
            yield ModelEvent(
                span_id=str(number),
                model=self._model,
                input=conversation.messages[:place],
                tools=[],
                tool_choice="auto",
                config=GenerateConfig(),
                output=self._output(reply, turn),
                working_start=at - began,
                timestamp=_at(at),
                completed=_at(at + took),
                working_time=took,
            )
            at += took
        yield SpanEndEvent(id=str(number), span_id=str(number), working_start=at - began, timestamp=_at(at))

    def _output(self, reply: ChatMessage, turn: Turn | None) -> ModelOutput:
        message = reply if isinstance(reply, ChatMessageAssistant) else ChatMessageAssistant(content=reply.content)
        if turn is None:
            return ModelOutput(model=self._model, choices=[ChatCompletionChoice(message=message)])
        stop = "tool_calls" if message.tool_calls and turn.finish_reason == "stop" else turn.finish_reason
        return ModelOutput(
            model=self._model,
            choices=[ChatCompletionChoice(message=message, stop_reason=_STOPS.get(stop, "stop"))],
            usage=_usage(turn.start, turn.cached_tokens, turn.end - turn.start),
            time=turn.seconds,
        )


def _results(summary: StepSummary) -> EvalResults:
    """Return the statistics of a step's rewards, as in reports."""
    rewards = summary.rewards
    metrics = {}
    if summary.reward is not None:
        metrics["mean"] = EvalMetric(name="mean", value=summary.reward.value)
        if summary.reward.margin is not None:
            metrics["margin_95"] = EvalMetric(name="margin_95", value=summary.reward.margin)
    score = EvalScore(
        name=_REWARD,
        scorer=_REWARD,
        scored_samples=rewards,
        unscored_samples=summary.planned - rewards,
        metrics=metrics,
    )
    return EvalResults(total_samples=summary.planned, completed_samples=summary.completed, scores=[score])


def _error(record: RolloutRecord, rollout: Rollout | None) -> EvalError | None:
    if record.outcome is Outcome.COMPLETED:
        return None
    failure = rollout.failure if rollout is not None else None
    traceback = (failure.traceback or "") if failure is not None else ""
    ending = record.outcome or "the step was interrupted before this rollout ended"
    message = ": ".join(filter(None, (ending, record.reason, record.message)))
    return EvalError(message=message, traceback=traceback, traceback_ansi=traceback)


# --- conversations ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Conversation:
    """One conversation of a rollout. `replies` maps the indices of the model's messages to their turns, if known."""

    name: str
    messages: list[ChatMessage]
    replies: Mapping[int, Turn | None]


def _conversations(rollout: Rollout) -> Iterator[_Conversation]:
    images = {
        image.sha256: f"data:{image.media_type};base64,{base64.b64encode(rollout.images[image.sha256]).decode()}"
        for segment in rollout.segments
        for image in segment.images
    }
    for number, segment in enumerate(rollout.segments):
        messages = _chat(segment.messages, f"{rollout.rollout_id}/{number}", images)
        replies = {place: segment.turns[turn] for turn, place in replies_by_turn(segment).items()}
        yield _Conversation(segment.split_reason, messages, replies)


def _chat(messages: Sequence[Mapping[str, Any]], prefix: str, images: Mapping[str, str]) -> list[ChatMessage]:
    """Convert messages from the OpenAI format to Inspect's. Unknown roles become the user's."""
    found: list[ChatMessage] = []
    for number, message in enumerate(messages):
        content, key = _content(message.get("content"), images), f"{prefix}/{number}"
        match message.get("role"):
            case "system" | "developer":
                found.append(ChatMessageSystem(id=key, content=content))
            case "assistant":
                found.append(_assistant(message, content, key))
            case "tool":
                call = message.get("tool_call_id")
                found.append(ChatMessageTool(id=key, content=content, tool_call_id=str(call) if call else None))
            case _:
                found.append(ChatMessageUser(id=key, content=content))
    return found


def _assistant(message: Mapping[str, Any], content: str | list[Content], key: str) -> ChatMessageAssistant:
    if reasoning := text_of(message.get("reasoning_content")):
        text: list[Content] = [ContentText(text=content)] if isinstance(content, str) else content
        content = [ContentReasoning(reasoning=reasoning), *text]
    calls = message.get("tool_calls")
    found = [_call(call, f"{key}/{i}") for i, call in enumerate(calls)] if isinstance(calls, Sequence) else []
    return ChatMessageAssistant(id=key, content=content, tool_calls=found or None)


def _call(call: object, key: str) -> ToolCall:
    fields = call if isinstance(call, Mapping) else {}
    function = fields.get("function")
    name, arguments = (
        (function.get("name"), function.get("arguments")) if isinstance(function, Mapping) else (None, call)
    )
    error = None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as found:
            arguments, error = {"arguments": arguments}, str(found)
    if not isinstance(arguments, Mapping):
        arguments = {"arguments": arguments}
    return ToolCall(
        id=str(fields.get("id") or key), function=str(name or "unknown"), arguments=dict(arguments), parse_error=error
    )


def _content(content: object, images: Mapping[str, str]) -> str | list[Content]:
    if isinstance(content, str) or not isinstance(content, Sequence):
        return text_of(content)
    return [_part(part, images) for part in content]


def _part(part: object, images: Mapping[str, str]) -> Content:
    url = part.get("image_url") if isinstance(part, Mapping) else None
    name = str(url.get("url")).removeprefix("sha256:") if isinstance(url, Mapping) else ""
    return ContentImage(image=images[name]) if name in images else ContentText(text=text_of([part]))


# --- numbers ----------------------------------------------------------------------------------------------


def _usage(prompt: int, cached: int | None, sampled: int) -> ModelUsage:
    return ModelUsage(
        input_tokens=prompt - (cached or 0),
        input_tokens_cache_read=cached,
        output_tokens=sampled,
        total_tokens=prompt + sampled,
    )


def _usage_of(results: Iterable[ResultSummary]) -> ModelUsage:
    each = [_usage(result.prompt_tokens, result.cached_tokens, result.sampled_tokens) for result in results]
    return sum(each, start=ModelUsage(input_tokens_cache_read=0))


def _time(seconds: float, precision: str = "milliseconds") -> str:
    return _at(seconds).isoformat(timespec=precision)


def _at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
