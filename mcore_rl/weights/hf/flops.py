"""Counts the floating-point operations of a model, from config.json and sequence lengths.

After Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters",
appendix, with the sizes of each family, only the experts that a token goes to, and only the pairs
of tokens that causal attention and its windows leave. A product of [m, k] and [k, n] counts
2 m k n; norms, softmax and activations are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.weights.hf.facts import ModelFacts

BACKWARD = 2
"""Operations of a backward pass for each of the forward pass: gradients of inputs and weights."""


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of a model's forward pass.

    per_token         of all products with weights
    per_pair          of a query and a key that it sees, in all layers without a sliding window
    per_window_pair   the same in all layers with one
    window            tokens that a query sees there; None if no layer has a window
    """

    per_token: float
    per_pair: float
    per_window_pair: float
    window: int | None

    @staticmethod
    def of(facts: ModelFacts) -> "ModelFlops":
        sizes = facts.sizes
        hidden = sizes["hidden"]
        head_out = 1 if facts.has_value_head else sizes["vocab"]
        experts = _experts(facts) if facts.has_experts else 0
        num_moe = sum(facts.moe_layers)
        num_dense = len(facts.moe_layers) - num_moe
        products = hidden * head_out + len(facts.moe_layers) * _attention(facts)
        products += num_moe * experts + num_dense * 3 * hidden * sizes["dense_ffn"]
        kinds = facts.config.get("layer_types") or []
        window = _window(facts)
        num_windowed = kinds.count("sliding_attention") if window else 0
        per_layer = 2.0 * (sizes["q"] + sizes.get("v", sizes["q"]))
        num_full = len(facts.moe_layers) - num_windowed
        return ModelFlops(2.0 * products, num_full * per_layer, num_windowed * per_layer, window)

    def forward(self, lens_N: Sequence[int]) -> float:
        """Return the operations of a forward pass over sequences of these lengths."""
        operations = self.per_token * sum(lens_N)
        operations += self.per_pair * sum(_pairs(n, n) for n in lens_N)
        if self.window is not None:
            operations += self.per_window_pair * sum(_pairs(n, self.window) for n in lens_N)
        return operations

    def training(self, lens_N: Sequence[int]) -> float:
        """Return the operations of a forward and a backward pass.

        Recomputed activations are not counted, as in model FLOPs utilization (arXiv:2204.02311,
        appendix B).
        """
        return (1 + BACKWARD) * self.forward(lens_N)


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
