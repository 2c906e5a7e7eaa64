"""Has SGLang's server take requests for adapters by name, and serve one where a request names none.

    request of /generate     of OpenAI's API            answered with
    without lora_path        no model, or the server's  the default: an adapter, or the weights
    lora_path: "policy"      model: "policy"            that adapter; so does "<model>:policy"
    lora_path: "base"        model: "base"              the weights alone
    lora_path: "else"        model: "else"              refused (request_fields.py)

The server's schedulers know which version of an adapter is the newest.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

BASE = "base"
"""Names the weights without any adapter."""


@dataclass(frozen=True)
class AdapterSlots:
    """Adapters that an engine serves, and the room that it has for their factors.

    names     of the adapters
    rank      largest rank of their factors
    modules   that are adapted, by the names of HuggingFace modules
    set_up    import path of what each of its schedulers calls before it begins, with `folders` and
              the model's directory
    default   what requests that name none are answered with
    folders   of adapters in PEFT's format that it serves from the start, by name
    """

    names: tuple[str, ...]
    rank: int
    modules: tuple[str, ...]
    set_up: str
    default: str = BASE
    folders: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if BASE in self.names or len({*self.names}) < len(self.names):
            raise ValueError(
                f"adapters are named {list(self.names)}: give each a name of its own, none base"
            )

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> "AdapterSlots":
        fields: dict[str, Any] = json.loads(text)
        tuples = {name: tuple(fields[name]) for name in ("names", "modules")}
        return AdapterSlots(**{**fields, **tuples})

    def list_flags(self) -> list[str]:
        """Return SGLang's options. One more adapter fits a batch: requests for the base."""
        return [
            "--enable-lora",
            *("--max-lora-rank", str(self.rank)),
            *("--max-loras-per-batch", str(len(self.names) + 1)),
            *("--lora-target-modules", *self.modules),
        ]


def serve_by_name(names: Sequence[str], default: str) -> None:
    """Have the server that this process is to start know adapters by `names`."""
    manager: Any = import_module("sglang.srt.managers.tokenizer_manager").TokenizerManager
    registry: Any = import_module("sglang.srt.lora.lora_registry")
    health: str = import_module("sglang.srt.constants").HEALTH_CHECK_RID_PREFIX
    serving: Any = import_module("sglang.srt.entrypoints.openai.serving_base")
    begin, resolve = manager.init_lora, manager._validate_and_resolve_lora
    choose_in_request = serving.OpenAIServingBase._resolve_lora_path

    def begin_with_names(self: Any) -> None:
        begin(self)
        for name in names:
            ref = registry.LoRARef(lora_id=name, lora_name=name, lora_path=name)
            self.lora_registry._register_adapter(ref)
            self.lora_ref_cache[name] = ref

    async def resolve_names(self: Any, obj: Any) -> None:
        asked = obj.lora_path
        is_check = isinstance(obj.rid, str) and obj.rid.startswith(health)
        if isinstance(asked, list):
            obj.lora_path = [choose_adapter(default, each) for each in asked]
        elif obj.is_single or is_check:
            obj.lora_path = None if is_check else choose_adapter(default, asked)
        else:
            obj.lora_path = [choose_adapter(default, asked) for _ in obj.rid]
        await resolve(self, obj)

    def resolve_model(self: Any, request_model: str, explicit: Any) -> Any:
        known = request_model in names or request_model == BASE
        return request_model if known else choose_in_request(self, request_model, explicit)

    serving.OpenAIServingBase._resolve_lora_path = resolve_model
    manager.init_lora = begin_with_names
    manager._validate_and_resolve_lora = resolve_names


def choose_adapter(default: str, asked: str | None) -> str | None:
    """Return the adapter of a request; None: it wants the weights alone."""
    chosen = asked or default
    return None if chosen == BASE else chosen
