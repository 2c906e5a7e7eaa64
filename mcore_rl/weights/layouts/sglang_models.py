"""How SGLang 0.5.23's models cut their tensors, and which settings they don't support.

    self_attn.q_proj   EngineRule("attention")        rows cut by the ranks of an attention group
    mlp.down_proj      EngineRule("tensor", COLUMNS)  columns cut by all tensor-parallel ranks
    input_layernorm    WHOLE                          not cut

Source: srt/models and srt/layers. tests/scenarios/rollout compares all of it with SGLang itself.
Vision towers are in sglang_towers.py.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from mcore_rl.config import RolloutConfig
from mcore_rl.weights.hf.config import read_named_dtype
from mcore_rl.weights.layouts.layout import COLUMNS, ROWS, WHOLE, EngineRule
from mcore_rl.weights.layouts.sglang_mamba import MAMBA, MODULES, find_mamba_problems
from mcore_rl.weights.layouts.sglang_towers import (
    KIMI_K25,
    KIMI_VL,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    TOWER_RULES,
    find_tower_problems,
)
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.settings import is_sparse_layer
from mcore_rl.weights.models.table import HfConfig

QWEN3_5_MODELS = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", QWEN3_5, QWEN3_5_MOE)
RULES: Mapping[str, EngineRule] = {
    "model.embed_tokens": EngineRule("attention"),
    "lm_head": EngineRule("tensor"),
    "model.norm": WHOLE,
    "input_layernorm": WHOLE,
    "post_attention_layernorm": WHOLE,
    "self_attn.q_proj": EngineRule("attention"),
    "self_attn.k_proj": EngineRule("kv_heads"),
    "self_attn.v_proj": EngineRule("kv_heads"),
    "self_attn.o_proj": EngineRule("attention", COLUMNS),
    "self_attn.q_norm": WHOLE,
    "self_attn.k_norm": WHOLE,
    "self_attn.sinks": EngineRule("attention"),
    "self_attn.q_a_proj": WHOLE,
    "self_attn.q_a_layernorm": WHOLE,
    "self_attn.q_b_proj": EngineRule("attention"),
    "self_attn.kv_a_proj_with_mqa": WHOLE,
    "self_attn.kv_a_layernorm": WHOLE,
    "self_attn.kv_b_proj": EngineRule("attention"),
    "self_attn.indexer.wq_b": WHOLE,
    "self_attn.indexer.wk": WHOLE,
    "self_attn.indexer.k_norm": WHOLE,
    "self_attn.indexer.weights_proj": WHOLE,
    "linear_attn": EngineRule("attention"),
    "linear_attn.in_proj_qkvz": EngineRule("attention"),
    "linear_attn.in_proj_ba": EngineRule("attention"),
    "linear_attn.in_proj_qkv": EngineRule("attention", sections=True),
    "linear_attn.in_proj_z": EngineRule("attention"),
    "linear_attn.in_proj_b": EngineRule("attention"),
    "linear_attn.in_proj_a": EngineRule("attention"),
    "linear_attn.conv1d": EngineRule("attention", sections=True),
    "linear_attn.norm": WHOLE,
    "linear_attn.out_proj": EngineRule("attention", COLUMNS),
    "mlp.gate": WHOLE,
    "mlp.gate_proj": EngineRule("tensor"),
    "mlp.up_proj": EngineRule("tensor"),
    "mlp.down_proj": EngineRule("tensor", COLUMNS),
    "mlp.shared_experts.gate_proj": EngineRule("tensor"),
    "mlp.shared_experts.up_proj": EngineRule("tensor"),
    "mlp.shared_experts.down_proj": EngineRule("tensor", COLUMNS),
    "mlp.shared_expert.gate_proj": EngineRule("tensor"),
    "mlp.shared_expert.up_proj": EngineRule("tensor"),
    "mlp.shared_expert.down_proj": EngineRule("tensor", COLUMNS),
    "mlp.shared_expert_gate": WHOLE,
    "mlp.shared_mlp.gate_proj": EngineRule("tensor"),
    "mlp.shared_mlp.up_proj": EngineRule("tensor"),
    "mlp.shared_mlp.down_proj": EngineRule("tensor", COLUMNS),
    **dict.fromkeys(("enorm", "hnorm", "eh_proj", "shared_head.norm", "final_layernorm"), WHOLE),
    **{f"mtp.{name}": WHOLE for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")},
    **{f"mtp.{name}": WHOLE for name in ("fc", "norm")},
    **MODULES,
    "block_sparse_moe.gate": WHOLE,
    "mlp.router": WHOLE,
    "mlp.router.gate": WHOLE,
}
"""HF module within the layer -> how it is cut. Routed experts are cut by EXPERT_AXIS."""

EXPERT_BIASES = ("e_score_correction_bias", "expert_bias")
"""Last parts of the HF names of the bias that chooses experts, which every rank has whole."""
RULES_OF: Mapping[str, Mapping[str, EngineRule]] = {
    "MiniMaxM2ForCausalLM": {
        "self_attn.q_norm": EngineRule("attention"),
        "self_attn.k_norm": EngineRule("kv_heads"),
    },
}
"""Architecture -> rules that replace those in RULES."""

DENSE_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
SHARED_EXPERTS = ("mlp.shared_experts.", "mlp.shared_expert.")
SPARSE = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
# Architectures whose SGLang model reads the option; tests compare the layout with the model.
WITH_HEAD_BY_DP = {
    "Qwen3MoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4vMoeForConditionalGeneration",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    *SPARSE,
    "GptOssForCausalLM",
    "Qwen3ForCausalLM",
    QWEN3,
    QWEN3_MOE,
    QWEN3_5,
    QWEN3_5_MOE,
    KIMI_K25,
}
WITH_WHOLE_EMBEDDING_BY_DP = {*QWEN3_5_MODELS}
WITH_WHOLE_DENSE_LAYERS = {
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    *SPARSE,
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "Glm4vMoeForConditionalGeneration",
    KIMI_VL,
    KIMI_K25,
}
WITH_DEEPEP = {
    QWEN3_MOE,
    "Qwen3MoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4vMoeForConditionalGeneration",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    *SPARSE,
    KIMI_VL,
    KIMI_K25,
}

EXPERT_AXIS: Mapping[str, int | None] = {
    "gate_proj.weight": ROWS,
    "up_proj.weight": ROWS,
    "down_proj.weight": COLUMNS,
    "w1.weight": ROWS,
    "w3.weight": ROWS,
    "w2.weight": COLUMNS,
    "experts.gate_up_proj": 2,
    "experts.gate_up_proj_bias": 1,
    "experts.down_proj": 1,
    "experts.down_proj_bias": None,
}
"""Last two parts of a routed expert's HF name -> the axis that the ranks of its group cut.

Stacked tensors are those of transposed experts.

None: the first of these ranks has the whole tensor, the others have zeros.
"""

DTYPES = {
    ("Glm4MoeForCausalLM", "mlp.gate.weight"): "float32",
    ("Glm4MoeLiteForCausalLM", "mlp.gate.weight"): "float32",
    ("Glm4vMoeForConditionalGeneration", "mlp.gate.weight"): "float32",
    **{
        ("Glm4vMoeForConditionalGeneration", f"model.visual.merger.post_projection_norm.{kind}"): (
            "float32"
        )
        for kind in ("weight", "bias")
    },
    ("HYV3ForCausalLM", "mlp.router.gate.weight"): "float32",
    ("MiniMaxM2ForCausalLM", "block_sparse_moe.gate.weight"): "float32",
    ("GptOssForCausalLM", "mlp.experts.gate_up_proj_bias"): "float32",
    ("GptOssForCausalLM", "mlp.experts.down_proj_bias"): "float32",
    ("GptOssForCausalLM", "self_attn.sinks"): "bfloat16",
    **{
        (architecture, f"self_attn.indexer.k_norm.{kind}"): "float32"
        for architecture in SPARSE
        for kind in ("weight", "bias")
    },
    ("Qwen3NextForCausalLM", "linear_attn.A_log"): "float32",
    **{(architecture, "linear_attn.A_log"): "float32" for architecture in QWEN3_5_MODELS},
    ("NemotronHForCausalLM", "mixer.A_log"): "float32",
}
"""(architecture, HF name within the layer) -> dtype in engines, whatever the model's dtype is."""

HEAD_ON_EVERY_STAGE = {
    "Qwen3MoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "MixtralForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
}
"""Architectures that have the output layer on every pipeline stage."""

EMBEDDING_ON_EVERY_STAGE = {"MiniMaxM2ForCausalLM"}
"""Architectures that have the embedding on every pipeline stage."""

# Architectures whose SGLang model does not support a feature.
WITHOUT_STAGES = {
    "HYV3ForCausalLM",
    "OlmoeForCausalLM",
    KIMI_VL,
    "Qwen3NextForCausalLM",
}
WITHOUT_TENSOR_PARALLELISM = {"OlmoeForCausalLM"}
WITHOUT_EXPERT_PARALLELISM = {"GptOssForCausalLM"}
WITHOUT_ATTENTION_DP = {
    "HYV3ForCausalLM",
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    KIMI_VL,
    "NemotronHForCausalLM",
}
WITHOUT_TIED_HEAD = {
    "Qwen3MoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "MiniMaxM2ForCausalLM",
    "GptOssForCausalLM",
    "Qwen3NextForCausalLM",
    QWEN3_MOE,
}
WITHOUT_TIED_HEAD_IN_STAGES = {
    "LlamaForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
}
WITHOUT_DENSE_LAYERS = {"Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM", QWEN3_MOE}


@dataclass(frozen=True)
class SGLangSizes:
    """The sizes of `engines` equal engines, each of tp * pp ranks.

    dp                    groups within the tp ranks that each have a replica of attention
                          (--enable-dp-attention --dp-size)
    head_by_dp            each of these groups has the whole output layer (--enable-dp-lm-head)
    whole_dense_layers    every rank has the dense layers' whole MLP (--moe-dense-tp-size 1)
    whole_shared_experts  every rank has the whole shared experts (--moe-a2a-backend deepep)
    whole_tower           every rank has the whole vision tower (--mm-enable-dp-encoder)
    """

    engines: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1
    head_by_dp: bool = False
    whole_dense_layers: bool = False
    whole_shared_experts: bool = False
    whole_tower: bool = False

    @staticmethod
    def from_config(rollout: RolloutConfig) -> "SGLangSizes":
        """Return the sizes of a recipe's engines."""
        passed = rollout.sglang
        return SGLangSizes(
            rollout.engines,
            rollout.tp,
            rollout.ep,
            rollout.pp,
            rollout.attention_dp,
            head_by_dp=bool(passed.get("enable_dp_lm_head")),
            whole_dense_layers=passed.get("moe_dense_tp_size") == 1,
            whole_shared_experts=passed.get("moe_a2a_backend") == "deepep",
            whole_tower=bool(passed.get("mm_enable_dp_encoder")),
        )

    @property
    def engine_ranks(self) -> int:
        """Ranks of one engine."""
        return self.tp * self.pp


BUILT_IN: Mapping[str, Mapping[str, Callable[[HfConfig], Any]]] = {
    "MixtralForCausalLM": {"head_dim": lambda c: c["hidden_size"] // c["num_attention_heads"]},
    "Qwen2MoeForCausalLM": {"head_dim": lambda c: c["hidden_size"] // c["num_attention_heads"]},
    "OlmoeForCausalLM": {
        "norm_topk_prob": lambda c: False,
        "rms_norm_eps": lambda c: 1e-5,
        "num_key_value_heads": lambda c: c["num_attention_heads"],
    },
}
"""Architecture -> key of config.json -> (config) -> the value that SGLang always computes with."""

DTYPE_OF_CONFIG = {
    "GptOssForCausalLM",
    "Qwen3NextForCausalLM",
    *QWEN3_5_MODELS,
}
"""Architectures with tensors that SGLang holds in config.json's dtype, whatever its --dtype."""

ROTARY_SHARE = 0.25
ROTARY_SHARE_BESIDE = ("Qwen3NextForCausalLM", *QWEN3_5_MODELS)
"""Architectures that rotate so much of a head unless `partial_rotary_factor` stands beside the
rotary settings."""

NEEDED: Mapping[str, tuple[str, ...]] = {
    "HYV3ForCausalLM": ("qk_norm", "route_norm"),
    "MiniMaxM2ForCausalLM": ("use_qk_norm", "use_routing_bias", "rotary_dim", "scoring_func"),
    "Qwen3NextForCausalLM": ("full_attention_interval",),
    **dict.fromkeys(QWEN3_5_MODELS, ("full_attention_interval",)),
}
"""Architecture -> keys of config.json without which SGLang computes something else."""


def refuse_unserved(hf_config: HfConfig, sizes: SGLangSizes, dtype: str | None = None) -> None:
    """Raise ValueError naming the first setting that SGLang's model does not support or ignores.

    dtype   torch name of the dtype that the engine is told to compute in
    """
    architecture = family_of(hf_config).architecture
    problems = chain(
        _find_size_problems(hf_config, sizes), _find_setting_problems(hf_config, dtype)
    )
    first = next(problems, None)
    if first is not None:
        setting, problem = first
        raise ValueError(f"{setting}: SGLang's {architecture} {problem}")


def _find_size_problems(hf_config: HfConfig, sizes: SGLangSizes) -> Iterator[tuple[str, str]]:
    """Yield (setting, problem) for layers and sizes that SGLang's model does not support."""
    family = family_of(hf_config)
    architecture = family.architecture
    tied = bool(family.find_left_out(hf_config))
    if architecture in WITHOUT_DENSE_LAYERS:
        for layer in range(hf_config["num_hidden_layers"]):
            if not is_sparse_layer(hf_config, layer):
                setting = f"mlp_only_layers or decoder_sparse_step, dense layer {layer}"
                yield setting, "has experts in every layer"
    if sizes.tp > 1 and architecture in WITHOUT_TENSOR_PARALLELISM:
        problem = "normalizes queries and keys over all heads and knows one rank only"
        yield f"tp = {sizes.tp}", problem
    if sizes.pp > 1 and architecture in WITHOUT_STAGES:
        yield f"pp = {sizes.pp}", "has no pipeline stages"
    if sizes.ep > 1 and architecture in WITHOUT_EXPERT_PARALLELISM:
        problem = "loads unquantized experts on every rank: cut them by tp alone"
        yield f"ep = {sizes.ep}", problem
    if sizes.dp > 1 and architecture in WITHOUT_ATTENTION_DP:
        yield f"attention dp = {sizes.dp}", "has no DP attention"
    for option, is_set, known in (
        ("enable_dp_lm_head", sizes.head_by_dp, WITH_HEAD_BY_DP),
        ("moe_dense_tp_size", sizes.whole_dense_layers, WITH_WHOLE_DENSE_LAYERS),
        ("moe_a2a_backend", sizes.whole_shared_experts, WITH_DEEPEP),
        ("mm_enable_dp_encoder", sizes.whole_tower, TOWER_RULES),
    ):
        if is_set and architecture not in known:
            yield f"rollout.sglang.{option}", "does not read it: leave it out"
    if tied and architecture in WITHOUT_TIED_HEAD:
        yield "tie_word_embeddings = true", "has an output layer of its own"
    if tied and sizes.pp > 1 and architecture in WITHOUT_TIED_HEAD_IN_STAGES:
        yield f"tie_word_embeddings = true and pp = {sizes.pp}", "lacks a head"
    yield from find_tower_problems(hf_config, architecture, family.sizes(hf_config), sizes.pp)
    if architecture in MAMBA:
        yield from find_mamba_problems(hf_config, family.sizes(hf_config), sizes.tp // sizes.dp)


def _find_setting_problems(hf_config: HfConfig, dtype: str | None) -> Iterator[tuple[str, str]]:
    """Yield (setting, problem) for settings of config.json that SGLang's model ignores or lacks."""
    architecture = family_of(hf_config).architecture
    for key, value_of in BUILT_IN.get(architecture, {}).items():
        value = value_of(hf_config)
        if hf_config.get(key, value) not in (None, value):
            yield f"{key} = {hf_config[key]!r}", f"computes with {value!r}"
    saved = read_named_dtype(hf_config)
    if architecture in DTYPE_OF_CONFIG and dtype and saved not in (None, dtype):
        setting = f"dtype = {saved} in config.json and {dtype} for the engine"
        yield setting, "would mix the two"
    if architecture in ROTARY_SHARE_BESIDE:
        share = family_of(hf_config).rotary_share(hf_config)
        served = hf_config.get("partial_rotary_factor", ROTARY_SHARE)
        if share != served:
            setting = f"partial_rotary_factor = {share} in the rotary settings"
            yield setting, f"reads it beside them alone, and takes {served}: write it there, too"
    for key in NEEDED.get(architecture, ()):
        if key not in hf_config:
            problem = "takes that for another model than transformers does"
            yield f"no {key!r} in config.json", problem
