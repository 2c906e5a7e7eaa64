"""How SGLang 0.5.23's Nemotron-H cuts its tensors, and which settings it reads otherwise.

Source: srt/models/nemotron_h.py, srt/configs/nemotron_h.py, srt/layers/attention/mamba/mamba.py.
"""

from collections.abc import Iterator, Mapping

from mcore_rl.weights.layouts.layout import COLUMNS, WHOLE, EngineRule
from mcore_rl.weights.models.table import HfConfig

MAMBA = {"NemotronHForCausalLM"}
"""Architectures with Mamba-2 layers."""
MODULES: Mapping[str, EngineRule] = {
    "backbone.embeddings": EngineRule("attention"),
    "backbone.norm_f": WHOLE,
    "norm": WHOLE,
    "mixer": EngineRule("attention"),
    "mixer.in_proj": EngineRule("attention", sections=True),
    "mixer.conv1d": EngineRule("attention", sections=True),
    "mixer.norm": EngineRule("attention"),
    "mixer.out_proj": EngineRule("attention", COLUMNS),
    "mixer.q_proj": EngineRule("attention"),
    "mixer.k_proj": EngineRule("kv_heads"),
    "mixer.v_proj": EngineRule("kv_heads"),
    "mixer.o_proj": EngineRule("attention", COLUMNS),
    "mixer.up_proj": EngineRule("tensor"),
    "mixer.down_proj": EngineRule("tensor", COLUMNS),
    "mixer.gate": WHOLE,
    "mixer.fc1_latent_proj": WHOLE,
    "mixer.fc2_latent_proj": WHOLE,
    "mixer.shared_experts.up_proj": EngineRule("tensor"),
    "mixer.shared_experts.down_proj": EngineRule("tensor", COLUMNS),
}
"""HF module within the layer -> how it is cut."""
DEFAULT_GROUPS = 8
"""Groups of a Mamba-2 layer if config.json has no `mamba_n_groups`, whatever `n_groups` is."""
RENAMED_LAYERS = {"linear_attention", "full_attention"}
"""Names of transformers 5 for kinds of layers."""


def find_mamba_problems(
    hf_config: HfConfig, sizes: Mapping[str, int], tp: int
) -> Iterator[tuple[str, str]]:
    """Yield (setting, problem) for what SGLang's model does not support or reads otherwise.

    tp   ranks that share a Mamba-2 layer
    """
    groups = sizes["mamba_groups"]
    read = hf_config.get("mamba_n_groups", DEFAULT_GROUPS)
    if groups != read:
        yield f"n_groups = {groups}", f"reads mamba_n_groups alone, and computes with {read}"
    if groups % tp:
        yield f"tp = {tp}", f"does not cut the n_groups = {groups} of Mamba-2 layers into so many"
    if renamed := sorted(RENAMED_LAYERS & set(hf_config.get("layers_block_type") or ())):
        problem = "has other names: leave the key out, and write hybrid_override_pattern"
        yield f"layers_block_type with {', '.join(renamed)}", problem
