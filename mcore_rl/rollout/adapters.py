"""Has SGLang's server take requests for adapters by name, and serve one where a request names none.

    request                      answered with
    lora_path or model absent    the adapter that is named first
    lora_path: "policy"          that adapter
    lora_path: "base"            the weights alone

The server's schedulers know which version of an adapter is the newest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

BASE = "base"
"""Names the weights without any adapter."""


@dataclass(frozen=True)
class AdapterSlots:
    """Adapters that an engine serves, and the room that it has for their factors.

    names     of the adapters; requests that name none are answered with the first
    rank      largest rank of their factors
    modules   that are adapted, by the names of HuggingFace modules
    set_up    import path of what each of its schedulers calls before it begins
    """

    names: tuple[str, ...]
    rank: int
    modules: tuple[str, ...]
    set_up: str

    def __post_init__(self) -> None:
        if BASE in self.names or len({*self.names}) < len(self.names):
            raise ValueError(
                f"adapters are named {list(self.names)}: give each a name of its own, none base"
            )

    def list_flags(self) -> list[str]:
        """Return SGLang's options. One more adapter fits a batch: requests for the base."""
        return [
            "--enable-lora",
            *("--max-lora-rank", str(self.rank)),
            *("--max-loras-per-batch", str(len(self.names) + 1)),
            *("--lora-target-modules", *self.modules),
        ]


def serve_by_name(names: Sequence[str]) -> None:
    """Have the server that this process is to start know adapters by `names`."""
    manager: Any = import_module("sglang.srt.managers.tokenizer_manager").TokenizerManager
    registry: Any = import_module("sglang.srt.lora.lora_registry")
    health: str = import_module("sglang.srt.constants").HEALTH_CHECK_RID_PREFIX
    begin, resolve = manager.init_lora, manager._validate_and_resolve_lora

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
            obj.lora_path = [choose_adapter(names, each) for each in asked]
        elif obj.is_single or is_check:
            obj.lora_path = None if is_check else choose_adapter(names, asked)
        else:
            obj.lora_path = [choose_adapter(names, asked) for _ in obj.rid]
        await resolve(self, obj)

    manager.init_lora = begin_with_names
    manager._validate_and_resolve_lora = resolve_names


def choose_adapter(names: Sequence[str], asked: str | None) -> str | None:
    """Return the adapter of a request; None: it wants the weights alone."""
    if not asked:
        return names[0]
    return None if asked == BASE else asked
