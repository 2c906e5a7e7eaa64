"""Rules that families share: the tensors of Megatron's Transformer Engine layers, module by module.

    Megatron key (without layer number)             HF name
    decoder.layers.self_attention.linear_qkv.*  <-  model.layers.{layer}.self_attn.{q,k,v}_proj.*
    decoder.layers.mlp.linear_fc1.weight        <-  model.layers.{layer}.mlp.{gate,up}_proj.weight

table.py explains how the rows of these tensors are laid into one.
"""

from dataclasses import replace
from typing import Any

from mcore_rl.weights.models.table import EMBEDDING, HfTensor, Rule

LAYER = "decoder.layers."
HF_LAYER = "model.layers.{layer}."
ATTENTION = "self_attention."


def make_layer_rule(
    key: str, name: str, *axes: str, where: Any = "layer", dtype: str | None = None
) -> Rule:
    """Return the rule of a Megatron tensor that equals one HF tensor."""
    return Rule(LAYER + key, (HfTensor(HF_LAYER + name, axes, dtype),), where)


GATE_UP = ("gate_proj", "up_proj")


def make_gated_rule(
    key: str, name: str, ffn: str, where: Any, halves: tuple[str, str] = GATE_UP
) -> Rule:
    """Return the rule of a gated MLP's linear_fc1: the gate's rows, then the other half's."""
    tensors = (HfTensor(f"{HF_LAYER}{name}.{half}.weight", (ffn, "hidden")) for half in halves)
    return Rule(LAYER + key, tuple(tensors), where)


def _make_qkv_rule(kind: str, q: str, kv: str, *axes: str) -> Rule:
    """Return the rule of linear_qkv; `q` and `kv` name the sizes of the HF tensors' rows."""
    rows = {"q": q, "k": kv, "v": kv}
    tensors = (HfTensor(f"{HF_LAYER}self_attn.{x}_proj.{kind}", (rows[x], *axes)) for x in "qkv")
    return Rule(f"{LAYER}self_attention.linear_qkv.{kind}", tuple(tensors), groups="kv_heads")


MODEL = (
    Rule(
        EMBEDDING,
        (HfTensor("model.embed_tokens.weight", ("vocab", "hidden")),),
        where="model",
        padded=True,
    ),
    Rule(
        "output_layer.weight",
        (HfTensor("lm_head.weight", ("vocab", "hidden")),),
        where="model",
        padded=True,
    ),
    Rule(
        "decoder.final_layernorm.weight",
        (HfTensor("model.norm.weight", ("hidden",)),),
        where="model",
    ),
)

GROUPED_QUERY_ATTENTION = (
    make_layer_rule(
        "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", "hidden"
    ),
    _make_qkv_rule("weight", "q", "kv", "hidden"),
    _make_qkv_rule("bias", "q_bias", "kv_bias"),
    make_layer_rule("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "q_norm"),
    make_layer_rule("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "k_norm"),
    make_layer_rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "hidden", "q"),
)

LATENT_ATTENTION = (
    make_layer_rule("input_layernorm.weight", "input_layernorm.weight", "hidden"),
    make_layer_rule(
        ATTENTION + "linear_q_proj.weight", "self_attn.q_proj.weight", "whole_q", "hidden"
    ),
    make_layer_rule(
        ATTENTION + "linear_q_down_proj.weight", "self_attn.q_a_proj.weight", "q_rank", "hidden"
    ),
    make_layer_rule(
        ATTENTION + "linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight", "q_rank"
    ),
    make_layer_rule(
        ATTENTION + "linear_q_up_proj.weight", "self_attn.q_b_proj.weight", "q", "q_rank"
    ),
    make_layer_rule(
        ATTENTION + "linear_kv_down_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        "kv_down",
        "hidden",
    ),
    make_layer_rule(
        ATTENTION + "linear_kv_up_proj.layer_norm_weight",
        "self_attn.kv_a_layernorm.weight",
        "kv_rank",
    ),
    make_layer_rule(
        ATTENTION + "linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", "kv_up", "kv_rank"
    ),
    make_layer_rule(ATTENTION + "linear_proj.weight", "self_attn.o_proj.weight", "hidden", "v"),
)

DENSE_MLP = (
    make_layer_rule(
        "mlp.linear_fc1.layer_norm_weight",
        "post_attention_layernorm.weight",
        "hidden",
        where="dense",
    ),
    make_gated_rule("mlp.linear_fc1.weight", "mlp", "dense_ffn", "dense"),
    make_layer_rule(
        "mlp.linear_fc2.weight", "mlp.down_proj.weight", "hidden", "dense_ffn", where="dense"
    ),
)


def experts(
    name: str = "mlp", halves: tuple[str, str] = GATE_UP, down: str = "down_proj"
) -> tuple[Rule, ...]:
    """Return the rules of router and routed experts.

    `name` is the MLP's HF module within the layer, `halves` and `down` the projections of an
    expert.
    """
    return (
        make_layer_rule(
            "pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden", where="moe"
        ),
        make_layer_rule(
            "mlp.router.weight", f"{name}.gate.weight", "experts", "hidden", where="moe"
        ),
        make_gated_rule(
            "mlp.experts.experts.linear_fc1.weight",
            name + ".experts.{expert}",
            "expert_ffn",
            "moe",
            halves,
        ),
        make_layer_rule(
            "mlp.experts.experts.linear_fc2.weight",
            f"{name}.experts.{{expert}}.{down}.weight",
            "hidden",
            "expert_ffn",
            where="moe",
        ),
    )


EXPERTS = experts()
NUMBERED_EXPERTS = experts("block_sparse_moe", ("w1", "w3"), "w2")
"""Mixtral's names for the experts' projections."""


def make_expert_bias_rule(name: str) -> Rule:
    """Return the rule of the bias that balances the experts' load without a loss.

    The router adds it to the scores only for choosing experts. It is a buffer in Megatron, which no
    gradient changes; training leaves it as loaded unless `train.router_bias_rate` is set.
    """
    return make_layer_rule("mlp.router.expert_bias", name, "experts", where="moe", dtype="float32")


def make_shared_expert_rules(name: str) -> tuple[Rule, ...]:
    """Return the rules of the shared expert, which gets every token.

    `name` is its HF module within the layer.
    """
    return (
        make_gated_rule("mlp.shared_experts.linear_fc1.weight", name, "shared_ffn", "moe"),
        make_layer_rule(
            "mlp.shared_experts.linear_fc2.weight",
            name + ".down_proj.weight",
            "hidden",
            "shared_ffn",
            where="moe",
        ),
    )


SHARED_EXPERTS = make_shared_expert_rules("mlp.shared_experts")


def center_norms(table: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the rules of a model whose norms are multiplied with 1 + weight: they begin at 0."""
    return tuple(
        replace(rule, tensors=tuple(replace(t, initial="zeros") for t in rule.tensors))
        if "layernorm" in rule.key or rule.key.endswith("layer_norm_weight")
        else rule
        for rule in table
    )
