"""Random small models and random layouts of them, on both sides."""

from typing import Any

from hypothesis import strategies as st

from mcore_rl.weights.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.weights.layouts.sglang import SGLangLayout
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from mcore_rl.weights.layouts.tensors import Tensors
from mcore_rl.weights.models import family_of
from mcore_rl.weights.plan.shared_region import SplitGranularity
from mcore_rl.weights.plan.shares import ListedHosts, RegularHosts, Topology
from tests.support.megatron_layout import model_config

DTYPE = "float32"


BASE = {"hidden_size": 8, "num_attention_heads": 8, "intermediate_size": 8}
GROUPED = {"architectures": ["Qwen3ForCausalLM"], **BASE}
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    **BASE,
    "kv_lora_rank": 3,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 1,
    "v_head_dim": 1,
    "moe_intermediate_size": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}


NORMALIZED = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    **BASE,
    "num_local_experts": 4,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "rotary_dim": 1,
    "scoring_func": "sigmoid",
}
"""Its norms are cut on the engines' side alone, where the embedding is on every stage."""


@st.composite
def moe_models(draw: st.DrawFn) -> dict[str, Any]:
    """config.json of a small Qwen3-MoE that all layouts below divide."""
    return model_config(
        vocab_size=draw(st.integers(5, 40)),
        num_hidden_layers=draw(st.sampled_from([2, 4])),
        num_attention_heads=8,
        num_key_value_heads=draw(st.sampled_from([2, 4])),
        head_dim=draw(st.sampled_from([1, 2])),
        mlp_only_layers=[],
    )


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """config.json of a small model: grouped queries or latent attention, dense or with experts."""
    sizes = {
        "vocab_size": draw(st.integers(5, 40)),
        "num_hidden_layers": draw(st.sampled_from([2, 4])),
    }
    kind = draw(st.sampled_from(["experts", "grouped", "latent", "normalized"]))
    if kind == "experts":
        return draw(moe_models())
    if kind == "latent":
        return {**LATENT, **sizes, "q_lora_rank": draw(st.sampled_from([None, 3]))}
    heads = {
        "num_key_value_heads": draw(st.sampled_from([2, 4])),
        "head_dim": draw(st.sampled_from([1, 2])),
    }
    if kind == "normalized":
        return {**NORMALIZED, **sizes, **heads}
    return {**GROUPED, **sizes, **heads, "tie_word_embeddings": draw(st.booleans())}


@st.composite
def megatron_sizes(draw: st.DrawFn, config: dict[str, Any], max_ranks: int = 8) -> MegatronSizes:
    layers = config["num_hidden_layers"]
    pp = draw(st.sampled_from([1, 2]))
    vpp = draw(st.sampled_from([None, 2])) if pp == 2 and layers == 4 else None
    num_layers = config["num_hidden_layers"]
    uneven = (1, num_layers - 1)
    stages = draw(st.sampled_from([(), uneven])) if pp == 2 and vpp is None else ()
    left = max_ranks // pp
    tp = draw(st.sampled_from([n for n in (1, 2, 4) if n <= left]))
    cp = draw(st.sampled_from([n for n in (1, 2) if n * tp <= left]))
    dp = draw(st.integers(1, left // (tp * cp)))
    experts = [
        (ep, etp)
        for ep in (1, 2, 4)
        for etp in (1, 2, 4)
        if tp * cp * dp % (ep * etp) == 0 and ep <= 4
    ]
    ep, etp = draw(st.sampled_from(experts))
    padded = -(-config["vocab_size"] // (4 * tp)) * 4 * tp
    return MegatronSizes(
        padded_vocab=padded,
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        dp=dp,
        ep=ep,
        etp=etp,
        stage_layers=stages,
    )


@st.composite
def sglang_sizes(draw: st.DrawFn, max_ranks: int = 8) -> SGLangSizes:
    tp = draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.sampled_from([1, 2]))
    engines = draw(st.integers(1, max(1, max_ranks // (tp * pp))))
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if tp % n == 0]))
    dp = draw(st.sampled_from([n for n in (1, 2, 4) if tp % n == 0]))
    return SGLangSizes(engines=engines, tp=tp, ep=ep, pp=pp, dp=dp)


@st.composite
def topologies(draw: st.DrawFn, num_sources: int, num_targets: int) -> Topology:
    """Hosts apart, shared in part, or dealt out at random."""
    if draw(st.booleans()):
        hosts = st.integers(0, draw(st.integers(0, 4)))
        return ListedHosts(
            tuple(draw(st.lists(hosts, min_size=num_sources, max_size=num_sources))),
            tuple(draw(st.lists(hosts, min_size=num_targets, max_size=num_targets))),
        )
    return RegularHosts(draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(0, 8)))


GRANULARITIES = st.builds(
    SplitGranularity, min_bytes=st.sampled_from([1, 64, 1 << 16]), rows=st.sampled_from([1, 2, 4])
)


def megatron_layout(config: dict[str, Any], sizes: MegatronSizes) -> MegatronLayout:
    return MegatronLayout(family_of(config), config, sizes, DTYPE)


def sglang_layout(config: dict[str, Any], sizes: SGLangSizes) -> SGLangLayout:
    return SGLangLayout(family_of(config), config, sizes, DTYPE)


def names_of(tensors: Tensors) -> list[str]:
    """The HF names of all tensors of a model."""
    names = [entry.tensor.name for entry in tensors.model_entries]
    for layer in range(tensors.num_layers):
        names += [
            name for name, _, _ in tensors.list_layer_tensors(layer, range(tensors.num_experts))
        ]
    return names
