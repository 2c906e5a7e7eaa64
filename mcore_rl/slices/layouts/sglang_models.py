"""What is recorded of SGLang 0.5.23's models: who cuts which tensor along which axis, what they cannot do.

Source: srt/models and srt/layers; tests/rollout holds all of it against SGLang itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mcore_rl.slices.families import family_of
from mcore_rl.slices.families.settings import sparse_layers
from mcore_rl.slices.families.table import HfConfig
from mcore_rl.slices.hf.config import named_dtype

ROWS, COLUMNS = 0, 1


@dataclass(frozen=True)
class Rule:
    """Which group of ranks cuts a tensor along which axis; "all" cuts nothing."""

    group: Literal["all", "attention", "kv_heads", "tensor"]
    axis: int = ROWS


WHOLE = Rule("all")
RULES: Mapping[str, Rule] = {
    "model.embed_tokens": Rule("attention"),
    "lm_head": Rule("tensor"),
    "model.norm": WHOLE,
    "input_layernorm": WHOLE,
    "post_attention_layernorm": WHOLE,
    "self_attn.q_proj": Rule("attention"),
    "self_attn.k_proj": Rule("kv_heads"),
    "self_attn.v_proj": Rule("kv_heads"),
    "self_attn.o_proj": Rule("attention", COLUMNS),
    "self_attn.q_norm": WHOLE,
    "self_attn.k_norm": WHOLE,
    "self_attn.sinks": Rule("attention"),
    "self_attn.q_a_proj": WHOLE,
    "self_attn.q_a_layernorm": WHOLE,
    "self_attn.q_b_proj": Rule("attention"),
    "self_attn.kv_a_proj_with_mqa": WHOLE,
    "self_attn.kv_a_layernorm": WHOLE,
    "self_attn.kv_b_proj": Rule("attention"),
    "mlp.gate": WHOLE,
    "mlp.gate_proj": Rule("tensor"),
    "mlp.up_proj": Rule("tensor"),
    "mlp.down_proj": Rule("tensor", COLUMNS),
    "mlp.shared_experts.gate_proj": Rule("tensor"),
    "mlp.shared_experts.up_proj": Rule("tensor"),
    "mlp.shared_experts.down_proj": Rule("tensor", COLUMNS),
    "mlp.shared_expert.gate_proj": Rule("tensor"),
    "mlp.shared_expert.up_proj": Rule("tensor"),
    "mlp.shared_expert.down_proj": Rule("tensor", COLUMNS),
    "mlp.shared_expert_gate": WHOLE,
    "block_sparse_moe.gate": WHOLE,
    "mlp.router": WHOLE,
}
"""Module of a HF tensor, from within the layer on -> who cuts it; routed experts have a rule of their own."""

RULES_OF: Mapping[str, Mapping[str, Rule]] = {
    "MiniMaxM2ForCausalLM": {
        "self_attn.q_norm": Rule("attention"),
        "self_attn.k_norm": Rule("kv_heads"),
    },
}
"""Architecture -> where it differs from RULES."""

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
"""Last two parts of a routed expert's HF name -> the axis that tensor parallelism within experts cuts; None:
the first of these ranks has the whole, the others zeros.
"""

DTYPES = {
    ("Glm4MoeForCausalLM", "mlp.gate.weight"): "float32",
    ("MiniMaxM2ForCausalLM", "block_sparse_moe.gate.weight"): "float32",
    ("GptOssForCausalLM", "mlp.experts.gate_up_proj_bias"): "float32",
    ("GptOssForCausalLM", "mlp.experts.down_proj_bias"): "float32",
    ("GptOssForCausalLM", "self_attn.sinks"): "bfloat16",
}
"""(architecture, tensor) -> the dtype in which engines hold it, whatever the model's."""

HEAD_ON_EVERY_STAGE = {
    "Qwen3MoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "MixtralForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
}
"""Architectures whose pipeline stages all have the output layer."""
EMBEDDING_ON_EVERY_STAGE = {"MiniMaxM2ForCausalLM"}

WITHOUT_STAGES = {"OlmoeForCausalLM"}
WITHOUT_TENSOR_PARALLELISM = {"OlmoeForCausalLM"}
WITHOUT_EXPERT_PARALLELISM = {"GptOssForCausalLM"}
WITHOUT_ATTENTION_DP = {
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
}
WITHOUT_TIED_HEAD = {
    "Qwen3MoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "Glm4MoeForCausalLM",
    "MiniMaxM2ForCausalLM",
    "GptOssForCausalLM",
}
WITHOUT_TIED_HEAD_IN_STAGES = {"LlamaForCausalLM"}
WITHOUT_DENSE_LAYERS = {"Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM"}
"""What SGLang's models of these architectures cannot do."""


@dataclass(frozen=True)
class SGLangSizes:
    """`engines` engines alike, each of tp * pp ranks.

    dp   groups that attention is replicated over (--enable-dp-attention --dp-size), within the tp ranks
    """

    engines: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def engine_ranks(self) -> int:
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
"""Architecture -> key of config.json -> the value that SGLang computes with, whatever is written there."""

DTYPE_OF_CONFIG = {"GptOssForCausalLM"}
"""Architectures of which SGLang holds some tensors in the dtype of config.json, whatever it is told."""

NEEDED: Mapping[str, tuple[str, ...]] = {
    "MiniMaxM2ForCausalLM": ("use_qk_norm", "use_routing_bias", "rotary_dim", "scoring_func"),
}
"""Architecture -> keys of config.json without which SGLang computes something else than transformers."""


def refuse_unserved(hf_config: HfConfig, sizes: SGLangSizes, dtype: str | None = None) -> None:
    """ValueError names what SGLang's model of this config.json cannot do, or would do wrongly.

    `dtype`: that the engine is told to compute in.
    """
    family = family_of(hf_config)
    architecture, tied = family.architecture, bool(family.left_out(hf_config))

    def refuse(what: str, why: str) -> None:
        raise ValueError(f"{what}: SGLang's {architecture} {why}")

    if architecture in WITHOUT_DENSE_LAYERS:
        dense = [
            i for i in range(hf_config["num_hidden_layers"]) if not sparse_layers(hf_config, i)
        ]
        if dense:
            refuse(
                f"mlp_only_layers or decoder_sparse_step, dense layer {dense[0]}",
                "has experts in every layer",
            )
    if sizes.tp > 1 and architecture in WITHOUT_TENSOR_PARALLELISM:
        refuse(
            f"tp = {sizes.tp}", "normalises queries and keys over all heads and knows one rank only"
        )
    if sizes.pp > 1 and architecture in WITHOUT_STAGES:
        refuse(f"pp = {sizes.pp}", "has no pipeline stages")
    if sizes.ep > 1 and architecture in WITHOUT_EXPERT_PARALLELISM:
        refuse(f"ep = {sizes.ep}", "loads unquantised experts on every rank: cut them by tp alone")
    if sizes.dp > 1 and architecture in WITHOUT_ATTENTION_DP:
        refuse(f"attention dp = {sizes.dp}", "has no DP attention")
    if tied and architecture in WITHOUT_TIED_HEAD:
        refuse("tie_word_embeddings = true", "has an output layer of its own")
    if tied and sizes.pp > 1 and architecture in WITHOUT_TIED_HEAD_IN_STAGES:
        refuse(f"tie_word_embeddings = true and pp = {sizes.pp}", "lacks a head")
    for key, value_of in BUILT_IN.get(architecture, {}).items():
        value = value_of(hf_config)
        if hf_config.get(key, value) not in (None, value):
            refuse(f"{key} = {hf_config[key]!r}", f"computes with {value!r}")
    saved = named_dtype(hf_config)
    if architecture in DTYPE_OF_CONFIG and dtype and saved not in (None, dtype):
        refuse(f"dtype = {saved} in config.json and {dtype} for the engine", "would mix the two")
    for key in NEEDED.get(architecture, ()):
        if key not in hf_config:
            refuse(
                f"no {key!r} in config.json", "takes that for another model than transformers does"
            )
