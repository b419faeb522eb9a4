"""The tool and the reward of `games/lock.py` for verl's own tool loop, which loads both by name."""

from typing import Any

from games.lock import note, score
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Look(BaseTool):  # type: ignore[misc]
    """Reads the next note. verl creates an instance for each call, with the code of the row."""

    def __init__(self, config: Any, tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self._codes: dict[str, str] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        name, response = await super().create(instance_id)
        self._codes[name] = kwargs["create_kwargs"]["code"]
        return name, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        looks = sum(message["role"] == "tool" for message in kwargs["agent_data"].messages)
        return ToolResponse(text=note(self._codes[instance_id], looks)), 0.0, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._codes[instance_id]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Score the last reply of a conversation, whose special tokens verl has removed."""
    return score(solution_str.rpartition("assistant\n")[2], ground_truth)
