"""Serve agentcore-rl-toolkit's gateway, in its environment: PORT, the engine's URL and the model's folder."""

import json
import re
import sys
from typing import Any

from agentcore_rl_toolkit.rollout_gateway import RolloutGateway
from agentcore_rl_toolkit.rollout_gateway.render import HfTemplateRenderer
from agentcore_rl_toolkit.rollout_gateway.sampling_backends.sglang_http import SglangHttpBackend
from transformers import AutoTokenizer

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def parse_calls(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]], bool]:
    """Parse calls in Hermes' format. The toolkit has a parser for templates it knows, which this model's is not."""
    calls = [json.loads(found) for found in _CALL.findall(text)]
    return _CALL.sub("", text), [{"name": call["name"], "input": call["arguments"]} for call in calls], False


def main(port: int, engine: str, model: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    renderer = HfTemplateRenderer(tokenizer, tool_parser=parse_calls)
    gateway = RolloutGateway(backend=SglangHttpBackend(engine), renderer=renderer, tokenizer=tokenizer)
    gateway.run("127.0.0.1", port)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
