"""Check that the model's template writes a tool call which the renderer's parser reads back."""

from __future__ import annotations

from rollout_backend.config import RolloutConfig
from rollout_backend.core.check_result import CheckResult
from rollout_backend.errors import ConfigError

_NAME = "model-tools"


def check_tools(config: RolloutConfig) -> list[CheckResult]:
    """Return one line; none if the model's folder or its renderer cannot be loaded, which another check says."""
    from rollout_backend.rendering.renderer import load_renderer  # transformers are slow to import
    from rollout_backend.rendering.selection import CALL, call_turn, read_calls_of

    try:
        bundle = load_renderer(config.model)
    except ConfigError:
        return []
    try:
        prompt, turn = call_turn(bundle.renderer)
        read = read_calls_of(bundle.renderer, (prompt, turn))
    except Exception as error:  # a template or a parser may raise anything
        return [_warn(f"{bundle.name} cannot render and read a tool call ({type(error).__name__}: {error})")]
    if read == [CALL]:
        text = f"{bundle.name} renders a tool call and reads it back"
        return [CheckResult("ok", "model.renderer", text, _NAME)]
    return [_warn(f"{bundle.name} renders a tool call as {bundle.decode(turn)!r} and reads {read} from it")]


def _warn(text: str) -> CheckResult:
    advice = (
        "agents with tools will not get their calls. Set the renderer of this model's family, or for `default` its"
    )
    return CheckResult("warning", "model.renderer", f"{text}: {advice} tool_parser in model.renderer_options", _NAME)
