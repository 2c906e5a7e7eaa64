"""The model classes of an engine: only the one that it is asked for is imported."""

from importlib import import_module
from types import ModuleType
from typing import Any

from sglang_on_cpu.kernels import normalise_projections

MODULES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v2",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MixtralForCausalLM": "mixtral",
    "OlmoeForCausalLM": "olmoe",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
}
"""Architecture -> its file among SGLang's models; Qwen3-MoE is in `served_models`."""


class _Models(dict[str, type]):
    """SGLang's classes by architecture; those of MODULES are imported when they are looked for."""

    def __contains__(self, architecture: object) -> bool:
        return architecture in MODULES or super().__contains__(architecture)

    def get(self, architecture: str, default: Any = None) -> Any:
        if architecture in MODULES and not super().__contains__(architecture):
            self[architecture] = _import_class(architecture)
        return super().get(architecture, default)

    def __getitem__(self, architecture: str) -> type:
        found = self.get(architecture)
        if found is None:
            raise KeyError(architecture)
        return found


def import_models_when_asked() -> None:
    """SGLang imports all its 200 model files, half a core-second per rank, for one that is not registered."""
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.models = _Models(ModelRegistry.models)


def _import_class(architecture: str) -> type:
    module = import_module(f"sglang.srt.models.{MODULES[architecture]}")
    if architecture == "MiniMaxM2ForCausalLM":
        normalise_projections(module)
    return next(entry for entry in _entries(module) if entry.__name__ == architecture)


def _entries(module: ModuleType) -> list[type]:
    entry = module.EntryClass
    return entry if isinstance(entry, list) else [entry]
