"""Counts the floating-point operations of a model, from config.json and sequence lengths.

After Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters",
appendix, with the sizes of each family, only the experts that a token goes to, and only the pairs
of tokens that causal attention and its windows leave. A product of [m, k] and [k, n] counts
2 m k n; norms, softmax and activations are left out.
"""

from collections.abc import Sequence

from mcore_rl.slices.hf.facts import ModelFacts

BACKWARD = 2
"""Operations of a backward pass for each of the forward pass: gradients of inputs and weights."""


def training_flops(facts: ModelFacts, lens_N: Sequence[int]) -> float:
    """Return the operations of a forward and a backward pass over sequences of these lengths.

    Recomputed activations are not counted, as in model FLOPs utilization (arXiv:2204.02311,
    appendix B).
    """
    window = _window(facts)
    seen = sum(_pairs(num_tokens, num_tokens) for num_tokens in lens_N)
    seen_in_window = sum(_pairs(num_tokens, window or num_tokens) for num_tokens in lens_N)
    forward = forward_flops(facts, sum(lens_N), seen, seen_in_window)
    return (1 + BACKWARD) * forward


def forward_flops(facts: ModelFacts, num_tokens: int, seen: float, seen_in_window: float) -> float:
    """Return the operations of a forward pass.

    seen             pairs of a query and a key that it sees, over all sequences
    seen_in_window   the same in layers with a sliding window
    """
    sizes = facts.sizes
    hidden = sizes["hidden"]
    head_out = 1 if facts.has_value_head else sizes["vocab"]
    products = hidden * head_out
    for is_moe in facts.moe_layers:
        mlp = _experts(facts) if is_moe else 3 * hidden * sizes["dense_ffn"]
        products += _attention(facts) + mlp
    kinds = facts.config.get("layer_types") or []
    num_windowed = kinds.count("sliding_attention") if _window(facts) else 0
    num_full = len(facts.moe_layers) - num_windowed
    pairs = num_full * seen + num_windowed * seen_in_window
    values = sizes.get("v", sizes["q"])
    return 2.0 * (num_tokens * products + pairs * (sizes["q"] + values))


def _attention(facts: ModelFacts) -> int:
    """Return the multiplications per token of a layer's projections."""
    sizes = facts.sizes
    hidden = sizes["hidden"]
    if "kv_rank" not in sizes:
        return 2 * hidden * (sizes["q"] + sizes["kv"])
    rank = sizes["q_rank"]
    queries = rank * (hidden + sizes["q"]) if rank else hidden * sizes["q"]
    keys = hidden * sizes["kv_down"] + sizes["kv_rank"] * sizes["kv_up"]
    return queries + keys + sizes["v"] * hidden


def _experts(facts: ModelFacts) -> int:
    """Return the multiplications per token of a layer's router and experts."""
    sizes = facts.sizes
    hidden = sizes["hidden"]
    shared = sizes.get("shared_ffn", 0)
    has_gate = facts.family.options(facts.config).get("moe_shared_expert_gate", False)
    gate = hidden if has_gate else 0
    routed = facts.experts_per_token * sizes["expert_ffn"]
    return hidden * (sizes["experts"] + 3 * (routed + shared)) + gate


def _window(facts: ModelFacts) -> int | None:
    """Return how many tokens a query sees in layers with a sliding window; None without any."""
    return facts.config.get("sliding_window") if facts.config.get("layer_types") else None


def _pairs(num_tokens: int, window: int) -> int:
    """Return the pairs of a query and a key, itself or at most `window` - 1 tokens before it."""
    whole = min(num_tokens, window)
    return whole * (whole + 1) // 2 + (num_tokens - whole) * window
