"""Read replies with SGLang's own parsers, in the engine's environment: cases as JSON on stdin, readings on stdout."""

import json
import sys

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser


def read(case: dict) -> dict:
    content, reasoning = case["text"], ""
    if case["reasoning"]:
        parser = ReasoningParser(case["reasoning"], force_reasoning=case["opened"] or None)
        reasoning, content = parser.parse_non_stream(content)
    tools = [Tool(**tool) for tool in case["tools"]]
    parser = FunctionCallParser(tools, case["calls"])
    found = []
    if parser.has_tool_call(content or ""):
        content, found = parser.parse_non_stream(content)
    calls = [(call.name, json.loads(call.parameters)) for call in found]
    return {"content": (content or "").strip(), "reasoning": (reasoning or "").strip(), "calls": calls}


def main() -> None:
    readings = []
    for case in json.load(sys.stdin):
        try:
            readings.append(read(case))
        except Exception as error:
            readings.append({"content": f"{type(error).__name__}: {error}", "reasoning": "", "calls": []})
    print(json.dumps(readings))


if __name__ == "__main__":
    main()
