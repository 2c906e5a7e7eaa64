"""Nemotron-3 Nano and Super: each layer is a Mamba-2 layer, attention, experts or a dense MLP.

    config.json   hybrid_override_pattern = M E M E M * E ...     a letter for each layer
    M  Mamba-2    *  attention, without a rotary embedding    E  experts    -  dense MLP

A Mamba-2 layer (arXiv:2405.21060) projects its inputs at once. Each tensor-parallel rank has its
heads' and groups' rows of every part, so that Megatron has a key for each part:

    in_proj   z | x | B | C | dt        conv1d   x | B | C

Experts are a matrix, a squared ReLU and a matrix. In Super they compute on a projection of the
hidden states that is narrower than these (`moe_latent_size`); router and shared expert do not.
"""

from collections.abc import Mapping
from typing import Any

from mcore_rl.weights.models import rules
from mcore_rl.weights.models.settings import (
    BIASED_SIGMOID,
    find_group_refusal,
    make_base_options,
    make_expert_options,
    make_grouped_query_options,
    need,
    read_base_sizes,
    read_grouped_query_sizes,
)
from mcore_rl.weights.models.table import (
    EMBEDDING,
    Family,
    HfConfig,
    HfTensor,
    Rule,
    Section,
    Where,
)

KINDS: Mapping[str, Where] = {"M": "linear", "*": "softmax", "E": "moe", "-": "dense"}
"""Letter of a layer in hybrid_override_pattern -> where the rules of its tensors apply."""
LETTERS: Mapping[str, str] = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "moe": "E",
    "mlp": "-",
}
"""Kind of a layer in layers_block_type, as published or as transformers 5 writes it -> letter."""
UNLIMITED = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], None)
"""Values of time_step_limit that limit nothing."""
SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "mlp_hidden_act": ("relu2",),
    "mamba_hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_bias": (False,),
    "mamba_proj_bias": (False,),
    "use_conv_bias": (True,),
    "conv_kernel": (4,),
    "layer_norm_epsilon": (1e-5,),
    "time_step_limit": UNLIMITED,
    "sliding_window": (None,),
    "residual_in_fp32": (False,),
    "tie_word_embeddings": (False,),
    "n_shared_experts": (1,),
    "norm_topk_prob": (True,),
}
"""Settings that megatron-core's Mamba layer has built in, or that no published model changes."""


def read_pattern(config: HfConfig) -> str:
    """Return the letter of each layer.

    Raises ValueError naming a kind of layer that is not one of LETTERS.
    """
    pattern = config.get("hybrid_override_pattern")
    if pattern:
        return pattern
    kinds = need(config, "layers_block_type", "layer_types")
    unknown = sorted(set(kinds) - LETTERS.keys())
    if unknown:
        raise ValueError(
            f"layers_block_type has {', '.join(unknown)}; known are {', '.join(LETTERS)}"
        )
    return "".join(LETTERS[kind] for kind in kinds)


def add_num_layers(config: HfConfig) -> dict[str, Any]:
    """Return config.json with num_hidden_layers, which transformers 5 leaves out."""
    if config.get("num_hidden_layers") is not None:
        return dict(config)
    return {**config, "num_hidden_layers": len(read_pattern(config))}


def list_kinds(config: HfConfig, layer: int) -> frozenset[str]:
    return frozenset((KINDS[read_pattern(config)[layer]],))


def is_moe_layer(config: HfConfig, layer: int) -> bool:
    return read_pattern(config)[layer] == "E"


def is_mamba_layer(config: HfConfig, layer: int) -> bool:
    return read_pattern(config)[layer] == "M"


def read_sizes(config: HfConfig) -> dict[str, int]:
    """Return the sizes of all kinds of layers. Without `moe_latent_size` experts have no latent."""
    heads = need(config, "mamba_num_heads")
    inner = heads * need(config, "mamba_head_dim")
    groups = need(config, "mamba_n_groups", "n_groups")
    state = groups * need(config, "ssm_state_size")
    sizes = {
        **read_base_sizes(add_num_layers(config)),
        **read_grouped_query_sizes(config),
        "mamba_heads": heads,
        "mamba_groups": groups,
        "mamba_inner": inner,
        "mamba_state": state,
        "mamba_conv": inner + 2 * state,
        "mamba_in": 2 * inner + 2 * state + heads,
        "mamba_kernel": config.get("conv_kernel", 4),
        "one": 1,
        "shared_ffn": 0,
        "latent": 0,
        "expert_in": 0,
    }
    if "E" in read_pattern(config):
        latent = config.get("moe_latent_size") or 0
        sizes |= {
            "experts": need(config, "n_routed_experts", "num_local_experts"),
            "expert_ffn": need(config, "moe_intermediate_size"),
            "shared_ffn": need(config, "moe_shared_expert_intermediate_size"),
            "latent": latent,
            "expert_in": latent or sizes["hidden"],
        }
    return sizes


def make_options(config: HfConfig) -> dict[str, Any]:
    sizes = read_sizes(config)
    named = add_num_layers(config)
    named["rms_norm_eps"] = need(config, "layer_norm_epsilon", "norm_eps")
    options = {
        **make_base_options(named),
        **make_grouped_query_options(sizes),
        "is_hybrid_model": True,
        "gated_linear_unit": False,
        "activation_func": "relu2",
        "bias_activation_fusion": False,
        "mamba_num_heads": sizes["mamba_heads"],
        "mamba_head_dim": need(config, "mamba_head_dim"),
        "mamba_num_groups": sizes["mamba_groups"],
        "mamba_state_dim": need(config, "ssm_state_size"),
    }
    if not sizes["experts"]:
        return options
    options |= {
        **make_expert_options(config, sizes),
        **BIASED_SIGMOID,
        "moe_shared_expert_intermediate_size": sizes["shared_ffn"],
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor", 1.0),
        "moe_latent_size": sizes["latent"] or None,
    }
    if (config.get("n_group") or 1) > 1:
        options["moe_router_num_groups"] = config["n_group"]
        options["moe_router_group_topk"] = need(config, "topk_group")
    return options


def find_refusal(config: HfConfig) -> str:
    pattern = config.get("hybrid_override_pattern") or ""
    if unknown := sorted(set(pattern) - KINDS.keys()):
        return f"hybrid_override_pattern has {', '.join(unknown)}; known are {' '.join(KINDS)}"
    pattern = read_pattern(config)
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if kinds and pattern != read_pattern({"layers_block_type": kinds}):
        return f"layers_block_type is not what hybrid_override_pattern={pattern} says"
    num_layers = add_num_layers(config)["num_hidden_layers"]
    if len(pattern) != num_layers:
        return f"its pattern has {len(pattern)} layers, and num_hidden_layers={num_layers}"
    heads = need(config, "mamba_num_heads")
    groups = need(config, "mamba_n_groups", "n_groups")
    if heads % groups:
        return f"n_groups={groups} does not divide mamba_num_heads={heads}"
    return find_group_refusal(config, scored_by=2) if "E" in pattern else ""


HF_LAYER = "backbone.layers.{layer}."
MIXER = "mixer."


def _make_rule(key: str, name: str, *axes: str, where: Where, **more: Any) -> Rule:
    return Rule(rules.LAYER + key, (HfTensor(HF_LAYER + name, axes, **more),), where)


def _make_part_rules(
    name: str, axes: tuple[str, ...], parts: Mapping[str, str]
) -> tuple[Rule, ...]:
    """Return a rule for each part of a Mamba layer's tensor: name of the part -> its rows."""
    return tuple(
        _make_rule(
            f"{MIXER}{name}.{part}",
            MIXER + name,
            *axes,
            where="linear",
            section=Section(rows, tuple(parts.values())[:number]),
        )
        for number, (part, rows) in enumerate(parts.items())
    )


CONV = {"x": "mamba_inner", "B": "mamba_state", "C": "mamba_state"}
MAMBA = (
    _make_rule("mixer.in_proj.layer_norm_weight", "norm.weight", "hidden", where="linear"),
    *_make_part_rules(
        "in_proj.weight",
        ("mamba_in", "hidden"),
        {"z": "mamba_inner", **CONV, "dt": "mamba_heads"},
    ),
    *_make_part_rules("conv1d.weight", ("mamba_conv", "one", "mamba_kernel"), CONV),
    *_make_part_rules("conv1d.bias", ("mamba_conv",), CONV),
    _make_rule("mixer.dt_bias", "mixer.dt_bias", "mamba_heads", where="linear", initial="ones"),
    _make_rule("mixer.A_log", "mixer.A_log", "mamba_heads", where="linear", initial="log"),
    _make_rule("mixer.D", "mixer.D", "mamba_heads", where="linear", initial="ones"),
    _make_rule("mixer.norm.weight", "mixer.norm.weight", "mamba_inner", where="linear"),
    _make_rule(
        "mixer.out_proj.weight", "mixer.out_proj.weight", "hidden", "mamba_inner", where="linear"
    ),
)
ATTENTION = (
    _make_rule(
        "self_attention.linear_qkv.layer_norm_weight", "norm.weight", "hidden", where="softmax"
    ),
    Rule(
        rules.LAYER + "self_attention.linear_qkv.weight",
        tuple(
            HfTensor(f"{HF_LAYER}mixer.{x}_proj.weight", (rows, "hidden"))
            for x, rows in (("q", "q"), ("k", "kv"), ("v", "kv"))
        ),
        "softmax",
        groups="kv_heads",
    ),
    _make_rule(
        "self_attention.linear_proj.weight", "mixer.o_proj.weight", "hidden", "q", where="softmax"
    ),
)
DENSE_MLP = (
    _make_rule("mlp.linear_fc1.layer_norm_weight", "norm.weight", "hidden", where="dense"),
    _make_rule(
        "mlp.linear_fc1.weight", "mixer.up_proj.weight", "dense_ffn", "hidden", where="dense"
    ),
    _make_rule(
        "mlp.linear_fc2.weight", "mixer.down_proj.weight", "hidden", "dense_ffn", where="dense"
    ),
)


def _make_expert_rule(key: str, name: str, *axes: str, **more: Any) -> Rule:
    return _make_rule(f"mlp.{key}", MIXER + name, *axes, where="moe", **more)


EXPERTS = (
    _make_rule("pre_mlp_layernorm.weight", "norm.weight", "hidden", where="moe"),
    _make_expert_rule("router.weight", "gate.weight", "experts", "hidden"),
    _make_expert_rule(
        "router.expert_bias", "gate.e_score_correction_bias", "experts", dtype="float32"
    ),
    _make_expert_rule("fc1_latent_proj.weight", "fc1_latent_proj.weight", "latent", "hidden"),
    _make_expert_rule("fc2_latent_proj.weight", "fc2_latent_proj.weight", "hidden", "latent"),
    _make_expert_rule(
        "experts.experts.linear_fc1.weight",
        "experts.{expert}.up_proj.weight",
        "expert_ffn",
        "expert_in",
    ),
    _make_expert_rule(
        "experts.experts.linear_fc2.weight",
        "experts.{expert}.down_proj.weight",
        "expert_in",
        "expert_ffn",
    ),
    _make_expert_rule(
        "shared_experts.linear_fc1.weight", "shared_experts.up_proj.weight", "shared_ffn", "hidden"
    ),
    _make_expert_rule(
        "shared_experts.linear_fc2.weight",
        "shared_experts.down_proj.weight",
        "hidden",
        "shared_ffn",
    ),
)


def _make_model_rule(key: str, name: str, *axes: str, padded: bool = False) -> Rule:
    return Rule(key, (HfTensor(name, axes),), "model", padded=padded)


MODEL = (
    _make_model_rule(EMBEDDING, "backbone.embeddings.weight", "vocab", "hidden", padded=True),
    _make_model_rule("output_layer.weight", "lm_head.weight", "vocab", "hidden", padded=True),
    _make_model_rule("decoder.final_norm.weight", "backbone.norm_f.weight", "hidden"),
)

NEMOTRON_H = Family(
    "NemotronHForCausalLM",
    (*MODEL, *MAMBA, *ATTENTION, *DENSE_MLP, *EXPERTS),
    read_sizes,
    is_moe_layer,
    make_options,
    SETTINGS,
    refusal=find_refusal,
    carried=lambda config: r"mtp\..*",
    is_linear=is_mamba_layer,
    kinds=list_kinds,
    complete=add_num_layers,
    explicit=("num_key_value_heads", "head_dim"),
    tied={},
)
