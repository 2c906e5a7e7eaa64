"""Imports only the model class that an engine serves, and patches two of these classes."""

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sglang_on_cpu.mamba2 import scan_in_torch

MODULES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV32ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLMNextN": "deepseek_nextn",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeForCausalLMNextN": "glm4_moe_nextn",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "Glm4MoeLiteForCausalLMNextN": "glm4_moe_lite_nextn",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe",
    "GlmMoeDsaForCausalLM": "glm4_moe",
    "GptOssForCausalLM": "gpt_oss",
    "HYV3ForCausalLM": "hunyuan_v3",
    "HYV3ForCausalLMNextN": "hunyuan_v3_nextn",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "KimiVLForConditionalGeneration": "kimi_vl",
    "LlamaForCausalLM": "llama",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MixtralForCausalLM": "mixtral",
    "NemotronHForCausalLM": "nemotron_h",
    "OlmoeForCausalLM": "olmoe",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
}
"""Architecture -> its module in sglang.srt.models; Qwen3-MoE is in `served_models`."""
PROCESSORS = {"sglang.srt.multimodal.processors": ("qwen_vl", "glm4v", "kimi_vl")}
"""Package -> those of its modules that have processors of images for the models in MODULES."""


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


def import_few_image_processors() -> None:
    """Import the image processors of the families here, where SGLang would import those of all.

    The server of a vision-language model imports 45 files and the models that they name. Many fail
    on packages that a CPU environment lacks, and each failure is logged.
    """
    from sglang.srt.managers import multimodal_processor, tokenizer_manager

    import_all = multimodal_processor.import_processors

    def import_processors(package_name: str, overwrite: bool = False) -> None:
        if package_name not in PROCESSORS:
            import_all(package_name, overwrite)
            return
        for name in PROCESSORS[package_name]:
            module = import_module(f"{package_name}.{name}")
            for entry in vars(module).values():
                if isinstance(entry, type) and entry.__module__ == module.__name__:
                    for model in getattr(entry, "models", ()):
                        multimodal_processor.PROCESSOR_MAPPING[model] = entry

    tokenizer_manager.import_processors = import_processors


def _import_class(architecture: str) -> type:
    module = import_module(f"sglang.srt.models.{MODULES[architecture]}")
    if architecture == "MiniMaxM2ForCausalLM":
        normalize_projections(module)
    if architecture == "NemotronHForCausalLM":
        scan_in_torch(module)
    return next(entry for entry in _entries(module) if entry.__name__ == architecture)


def _entries(module: ModuleType) -> list[type]:
    entry = module.EntryClass
    return entry if isinstance(entry, list) else [entry]


def normalize_projections(minimax_m2: Any) -> None:
    """Normalize MiniMax-M2's queries and keys over the heads of all ranks in torch.

    SGLang does it in triton kernels. `minimax_m2` is SGLang's module of that name, which is
    imported only for such a model; import_models_when_asked calls this function then.
    """
    minimax_m2.rms_sumsq_serial = _sums_of_squares
    minimax_m2.rms_apply_serial = _normalize


def _sums_of_squares(q: Tensor, k: Tensor) -> Tensor:
    """Return the queries' sums of squares, then the keys', [2 * tokens]."""
    return torch.cat([x.float().square().sum(-1) for x in (q, k)])


def _normalize(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    sums: Tensor,
    num_ranks: int = 1,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Return this rank's normalized (q, k); `sums` is the total over all ranks."""

    def normalize(x: Tensor, weight: Tensor, sum_T: Tensor) -> Tensor:
        scale_T1 = (sum_T / x.shape[-1] / num_ranks + eps).rsqrt()[:, None]
        return (x.float() * scale_T1 * weight.float()).to(x.dtype)

    normed_q = normalize(q, q_weight, sums[: len(q)])
    normed_k = normalize(k, k_weight, sums[len(q) : 2 * len(q)])
    return normed_q, normed_k
