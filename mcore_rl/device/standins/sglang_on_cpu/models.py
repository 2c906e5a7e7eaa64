"""Imports only the model class that an engine serves."""

from importlib import import_module
from types import ModuleType
from typing import Any

from sglang_on_cpu.kernels import normalize_projections

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
"""Architecture -> its module in sglang.srt.models; Qwen3-MoE is in `served_models`."""


class _Models(dict[str, type]):
    """SGLang's model classes by architecture; those in MODULES are imported on first access."""

    def __contains__(self, architecture: object) -> bool:
        return architecture in MODULES or super().__contains__(architecture)

    def get(self, architecture: str, default: Any = None) -> Any:
        if architecture in MODULES and not super().__contains__(architecture):
            self[architecture] = _import_class(architecture)
        return super().get(architecture, default)

    def __getitem__(self, architecture: str) -> type:
        model_class = self.get(architecture)
        if model_class is None:
            raise KeyError(architecture)
        return model_class


def import_models_when_asked() -> None:
    """Import one model file where SGLang would import all 200.

    For an architecture that is not registered SGLang imports them all, half a core-second per rank.
    """
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.models = _Models(ModelRegistry.models)


def _import_class(architecture: str) -> type:
    module = import_module(f"sglang.srt.models.{MODULES[architecture]}")
    if architecture == "MiniMaxM2ForCausalLM":
        normalize_projections(module)
    return next(entry for entry in _entries(module) if entry.__name__ == architecture)


def _entries(module: ModuleType) -> list[type]:
    entry = module.EntryClass
    return entry if isinstance(entry, list) else [entry]
