"""DeepSeek-V3.2 and GLM-5 (also 5.1, 5.2): latent attention to the keys that an indexer chooses.

The rest of both models is a DeepSeek-V3. In every layer an indexer scores all keys of a query with
small heads of its own, and attention reads the best `index_topk` of them (DeepSeek-V3.2, DeepSeek
Sparse Attention). Megatron projects and normalizes one after the other, as the indexer reads
queries between the two:

    Megatron key in self_attention.                  HF name in self_attn.
    q_layernorm, linear_q_up_proj                <-  q_a_layernorm, q_b_proj
    core_attention.indexer.linear_wq_b           <-  indexer.wq_b             queries, from q_a
    core_attention.indexer.linear_wk, k_norm     <-  indexer.wk, k_norm       one key for all heads
    core_attention.indexer.linear_weights_proj   <-  indexer.weights_proj     weight of each head

In GLM-5.2 some layers have no indexer and read the keys that the last one before them chose.

The rotary embedding of the indexer turns halves of a head in DeepSeek-V3.2 and neighbors in GLM-5,
that of attention neighbors in both. The Hadamard transform of DeepSeek's own code serves FP8 alone:
it turns queries and keys alike and leaves their products as they are, so there is none here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_rl.weights.models import rules
from mcore_rl.weights.models.deepseek import DEEPSEEK_V3, read_deepseek_sizes
from mcore_rl.weights.models.settings import (
    find_mlp_types_refusal,
    find_rope_theta_refusal,
    is_after_dense_layers,
    match_mtp_names,
    need,
)
from mcore_rl.weights.models.table import Family, HfConfig

SPARSE = "dsa"
"""megatron-core's name of this kind of attention."""
INDEXER = "core_attention.indexer."
"""The beginning of an indexer's Megatron keys, within self_attention."""
INDEXER_NORM_EPSILON = 1e-6
"""Epsilon of the norm of an indexer's keys, built into both models."""
SHARING = "index_topk_freq"
UNSHARED = (1, None)
"""Values of settings by which no layer takes the choice of another one."""
FULL, SHARED = "full", "shared"
"""Kinds of layers in `indexer_types`: with an indexer, and without one."""
LETTERS = {"F": FULL, "S": SHARED}
"""Letters of `index_topk_pattern`."""
FIRST_SHARED_BY_DEFAULT = 2
"""The layer from which on `index_topk_freq` counts, from 1; as in transformers and SGLang."""


def list_indexers(config: HfConfig) -> list[bool]:
    """Return for each layer whether it has an indexer; others take the last choice before them.

    Raises ValueError if the settings name other kinds of layers, or another number of them.
    """
    num_layers = need(config, "num_hidden_layers")
    kinds = config.get("indexer_types")
    if kinds is None and config.get("index_topk_pattern"):
        kinds = [LETTERS.get(letter, letter) for letter in config["index_topk_pattern"]]
    if kinds is None:
        every = config.get(SHARING) or 1
        offset = config.get("index_skip_topk_offset")
        offset = FIRST_SHARED_BY_DEFAULT if offset is None else offset
        return [_has_indexer(layer, every, offset) for layer in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {FULL, SHARED}:
        found = ", ".join(sorted(map(str, set(kinds))))
        raise ValueError(
            f"indexer_types or index_topk_pattern with {len(kinds)} layers of kinds {found}:"
            f" expected {num_layers} of {FULL} and {SHARED}"
        )
    return [kind == FULL for kind in kinds]


def _has_indexer(layer: int, every: int, offset: int) -> bool:
    """Return whether a layer, from 0, has an indexer if every so many have, from `offset` on."""
    return max(layer + 1 - offset, 0) % every == 0


def find_sharing(config: HfConfig) -> tuple[int, int] | None:
    """Return (every, offset) that say which layers have indexers; None if none do.

    megatron-core knows patterns of this form alone.
    """
    indexers = list_indexers(config)
    numbers = range(1, len(indexers) + 1)
    for every in numbers:
        for offset in numbers if every > 1 else (1,):
            if indexers == [_has_indexer(i, every, offset) for i in range(len(indexers))]:
                return every, offset
    return None


def list_kinds(config: HfConfig, layer: int) -> frozenset[str]:
    """Return the values of Rule.where of a layer's tensors, besides "layer"."""
    mlp = "moe" if is_after_dense_layers(config, layer) else "dense"
    indexed = ("indexed",) if list_indexers(config)[layer] else ()
    return frozenset((mlp, "softmax", *indexed))


def read_sparse_sizes(config: HfConfig) -> Mapping[str, int]:
    """Return the sizes of DeepSeek-V3 and of the indexers. Raises ValueError for a missing key."""
    heads = need(config, "index_n_heads")
    head = need(config, "index_head_dim")
    return {
        **read_deepseek_sizes(config),
        "q_rank": need(config, "q_lora_rank"),
        "index_topk": need(config, "index_topk"),
        "index_heads": heads,
        "index_head": head,
        "index_q": heads * head,
    }


def make_sparse_options(config: HfConfig, *, interleaved: bool) -> dict[str, Any]:
    """Return the arguments of DeepSeek-V3 and of the indexers.

    interleaved   whether the indexer's rotary embedding turns neighbors, not halves
    """
    sizes = read_sparse_sizes(config)
    sharing = find_sharing(config)
    assert sharing is not None, "find_sparse_refusal knows no such pattern"
    return {
        **DEEPSEEK_V3.options(config),
        "dsa_indexer_topk_freq": sharing[0],
        "dsa_indexer_skip_topk_offset": sharing[1],
        # Checkpoints have a key per layer where layers differ, which megatron-core does not see.
        "hetereogenous_dist_checkpoint": sharing[0] > 1,
        "experimental_attention_variant": SPARSE,
        "dsa_indexer_n_heads": sizes["index_heads"],
        "dsa_indexer_head_dim": sizes["index_head"],
        "dsa_indexer_topk": sizes["index_topk"],
        "dsa_indexer_rope_interleaved": interleaved,
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_k_norm_epsilon": INDEXER_NORM_EPSILON,
        # Context-parallel ranks gather all keys: the only way that this attention has.
        "cp_comm_type": "all_gather",
    }


def find_sparse_refusal(config: HfConfig, *, shares: bool) -> str:
    """Return why a model cannot be carried whose settings are supported one by one, or "".

    shares   whether the family has layers that share an indexer
    """
    kinds = config.get("layer_types")
    if kinds is not None and list(kinds) != ["indexed_attention"] * len(list_indexers(config)):
        return f"layer_types={kinds!r:.80} is not what sparse attention in every layer is"
    if reason := find_mlp_types_refusal(config) or _find_sharing_refusal(config, shares=shares):
        return reason
    sizes = read_sparse_sizes(config)
    if sizes["index_topk"] < 1 or sizes["index_head"] < need(config, "qk_rope_head_dim"):
        return (
            f"index_topk={sizes['index_topk']} and index_head_dim={sizes['index_head']}: an indexer"
            " chooses at least one key, and its heads are no narrower than"
            f" qk_rope_head_dim={config['qk_rope_head_dim']}"
        )
    return find_rope_theta_refusal(config) or DEEPSEEK_V3.refusal(config)


def _find_sharing_refusal(config: HfConfig, *, shares: bool) -> str:
    indexers = list_indexers(config)
    shown = "".join("F" if has_indexer else "S" for has_indexer in indexers)
    if not shares and not all(indexers):
        return f"layers {shown:.80} share indexers (S), which this family does not"
    if not indexers[0]:
        return f"layers {shown:.80} begin with one that shares an indexer (S), and there is none"
    if find_sharing(config) is None:
        return (
            f"layers {shown:.80}: megatron-core has layers with an indexer (F) at equal distances"
            " alone, after any number of them at the beginning"
        )
    return ""


def _make_attention_rule(key: str, name: str, *axes: str) -> Any:
    return rules.make_layer_rule(rules.ATTENTION + key, "self_attn." + name, *axes)


def _make_indexer_rule(key: str, name: str, *axes: str) -> Any:
    rule = _make_attention_rule(INDEXER + key, "indexer." + name, *axes)
    return replace(rule, where="indexed")


RULES = (
    *rules.MODEL,
    rules.make_layer_rule("input_layernorm.weight", "input_layernorm.weight", "hidden"),
    _make_attention_rule("linear_q_down_proj.weight", "q_a_proj.weight", "q_rank", "hidden"),
    _make_attention_rule("q_layernorm.weight", "q_a_layernorm.weight", "q_rank"),
    _make_attention_rule("linear_q_up_proj.weight", "q_b_proj.weight", "q", "q_rank"),
    _make_attention_rule(
        "linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", "kv_down", "hidden"
    ),
    _make_attention_rule("kv_layernorm.weight", "kv_a_layernorm.weight", "kv_rank"),
    _make_attention_rule("linear_kv_up_proj.weight", "kv_b_proj.weight", "kv_up", "kv_rank"),
    _make_attention_rule("linear_proj.weight", "o_proj.weight", "hidden", "v"),
    _make_indexer_rule("linear_wq_b.weight", "wq_b.weight", "index_q", "q_rank"),
    _make_indexer_rule("linear_wk.weight", "wk.weight", "index_head", "hidden"),
    _make_indexer_rule("k_norm.weight", "k_norm.weight", "index_head"),
    _make_indexer_rule("k_norm.bias", "k_norm.bias", "index_head"),
    _make_indexer_rule(
        "linear_weights_proj.weight", "weights_proj.weight", "index_heads", "hidden"
    ),
    *rules.DENSE_MLP,
    *rules.EXPERTS,
    rules.make_expert_bias_rule("mlp.gate.e_score_correction_bias"),
    *rules.SHARED_EXPERTS,
)

DEEPSEEK_V32 = Family(
    "DeepseekV32ForCausalLM",
    RULES,
    read_sparse_sizes,
    is_after_dense_layers,
    lambda config: make_sparse_options(config, interleaved=False),
    {
        **DEEPSEEK_V3.supported,
        "indexer_rope_interleave": (False,),
        SHARING: UNSHARED,
        "cli_factor": UNSHARED,
        "index_kpool": UNSHARED,
        "index_k_norm_type": ("layer",),
        "index_init_tokens": (0,),
        "index_local_tokens": (0,),
    },
    rope_types=DEEPSEEK_V3.rope_types,
    refusal=lambda config: find_sparse_refusal(config, shares=False),
    explicit=DEEPSEEK_V3.explicit,
    carried=match_mtp_names,
    kinds=list_kinds,
)

GLM5 = replace(
    DEEPSEEK_V32,
    architecture="GlmMoeDsaForCausalLM",
    options=lambda config: make_sparse_options(config, interleaved=True),
    supported={
        **{key: values for key, values in DEEPSEEK_V32.supported.items() if key != SHARING},
        "indexer_rope_interleave": (True,),
    },
    refusal=lambda config: find_sparse_refusal(config, shares=True),
    # SGLang takes False for the first key, transformers True.
    explicit=("indexer_rope_interleave", *DEEPSEEK_V3.explicit),
)
