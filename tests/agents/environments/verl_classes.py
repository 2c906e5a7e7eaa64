"""A tool and an interaction on verl's own base classes, as its users write them."""

from typing import Any

from verl.interactions.base import BaseInteraction  # pyright: ignore[reportMissingImports]
from verl.tools.base_tool import BaseTool  # pyright: ignore[reportMissingImports]
from verl.tools.schemas import ToolResponse  # pyright: ignore[reportMissingImports]


class Notes(BaseTool):
    """Keeps a list of notes for each trajectory."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.notes: dict[str, list[str]] = {}

    async def create(self, instance_id=None, **kwargs):
        instance_id, response = await super().create(instance_id, **kwargs)
        self.notes[instance_id] = list(kwargs["create_kwargs"]["notes"])
        return instance_id, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        if parameters["note"] == "away":
            return ToolResponse(text="no notes"), 0.0, {"api_request_error": "status 503"}
        self.notes[instance_id].append(parameters["note"] + kwargs.get("mark", ""))
        return ToolResponse(text=",".join(self.notes[instance_id])), 0.25, {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return float(len(self.notes[instance_id]))

    async def release(self, instance_id: str, **kwargs) -> None:
        del self.notes[instance_id]
        print(f"{len(self.notes)} left", flush=True)


class Echo(BaseInteraction):
    """Repeats what the policy says; keeps the base class's other methods."""

    async def generate_response(self, instance_id, messages, **kwargs):
        text = messages[-1]["content"]
        return text == "bye", f"{kwargs['prefix']}{text}", 0.5, {"len": len(messages)}
