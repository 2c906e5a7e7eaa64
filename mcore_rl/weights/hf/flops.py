"""Counts the floating-point operations of a model, from config.json and sequence lengths.

After Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters",
appendix, with the sizes of each family, only the experts that a token goes to, and only the pairs
of tokens that causal attention and its windows leave. A product of [m, k] and [k, n] counts
2 m k n; norms, softmax and activations are left out.

Counts the floating-point operations of a vision tower, from config.json and grids of images.

    patches --> blocks --> projectors --> tokens
    P x per_patch, pairs   P / merge**2 x per_token

As in flops.py a product of [m, k] and [k, n] counts 2 m k n. Norms, activations, rotations and the
interpolation of positions are left out.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.models.tower import PREFIX, merge_size, read_vision_settings
from mcore_rl.weights.models.value_head import find_stem

BACKWARD = 2
"""Operations of a backward pass for each of the forward pass: gradients of inputs and weights."""


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of a model's forward pass.

    per_token         of all products with weights
    per_pair          of a query and a key that it sees, in all layers of softmax attention without
                      a sliding window
    per_window_pair   the same in all layers with one, or with sparse attention
    window            keys that a query reads there; None if no layer reads fewer than all
    indexer           operations of all indexers of sparse attention: of a token, and of a query and
                      a key that it sees; they have no backward pass
    drafts            operations of trained layers for multi-token prediction in a forward and a
                      backward pass together: of a token, and of a query and a key that it sees
    """

    per_token: float
    per_pair: float
    per_window_pair: float
    window: int | None
    indexer: tuple[float, float] = (0.0, 0.0)
    drafts: tuple[float, float] = (0.0, 0.0)

    @staticmethod
    def from_facts(facts: ModelFacts) -> "ModelFlops":
        sizes = facts.sizes
        hidden = sizes["hidden"]
        head_out = 1 if facts.has_value_head else sizes["vocab"]
        experts = _count_experts(facts) if facts.has_experts else 0
        nums = Counter(
            kind
            for layer in range(sizes["layers"])
            for kind in facts.family.list_kinds(facts.config, layer)
        )
        products = hidden * head_out + nums["softmax"] * _count_attention(facts)
        if nums["linear"]:
            count_linear = _count_mamba if "mamba_in" in sizes else _count_delta_net
            products += nums["linear"] * count_linear(facts)
        dense = _count_matrices(facts) * hidden * sizes["dense_ffn"]
        products += nums["moe"] * experts + nums["dense"] * dense
        kinds = facts.config.get("layer_types") or []
        window = _find_window(facts)
        num_windowed = kinds.count("sliding_attention") if window else 0
        if "index_topk" in sizes:
            window, num_windowed = sizes["index_topk"], nums["softmax"]
        per_layer = 2.0 * (sizes["q"] + sizes.get("v", sizes["q"]))
        num_full = nums["softmax"] - num_windowed
        pairs = (num_full * per_layer, num_windowed * per_layer)
        indexer = _count_indexers(facts, nums["indexed"])
        drafts = _count_drafts(facts, experts or dense, per_layer)
        return ModelFlops(2.0 * products, *pairs, window, indexer, drafts)

    def count_forward(self, lens_N: Sequence[int]) -> float:
        """Return the operations of a forward pass over sequences of these lengths."""
        return self._count_trained(lens_N) + self._count_indexers(lens_N)

    def _count_indexers(self, lens_N: Sequence[int]) -> float:
        per_token, per_pair = self.indexer
        return per_token * sum(lens_N) + per_pair * sum(_count_pairs(n, n) for n in lens_N)

    def _count_trained(self, lens_N: Sequence[int]) -> float:
        operations = self.per_token * sum(lens_N)
        operations += self.per_pair * sum(_count_pairs(n, n) for n in lens_N)
        if self.window is not None:
            operations += self.per_window_pair * sum(_count_pairs(n, self.window) for n in lens_N)
        return operations

    def count_training(self, lens_N: Sequence[int]) -> float:
        """Return the operations of a forward and a backward pass.

        Recomputed activations are not counted, as in model FLOPs utilization (arXiv:2204.02311,
        appendix B).
        """
        trained = (1 + BACKWARD) * self._count_trained(lens_N) + self._count_indexers(lens_N)
        per_token, per_pair = self.drafts
        pairs = sum(_count_pairs(n, n) for n in lens_N)
        return trained + per_token * sum(lens_N) + per_pair * pairs


def _count_indexers(facts: ModelFacts, num_indexers: int) -> tuple[float, float]:
    """Return the operations of all indexers, by token and by pair of a query and a key."""
    sizes = facts.sizes
    if "index_topk" not in sizes:
        return 0.0, 0.0
    products = sizes["q_rank"] * sizes["index_q"]
    products += sizes["hidden"] * (sizes["index_head"] + sizes["index_heads"])
    per_pair = sizes["index_q"] + sizes["index_heads"]
    return 2.0 * num_indexers * products, 2.0 * num_indexers * per_pair


def _count_drafts(facts: ModelFacts, mlp: int, per_pair: float) -> tuple[float, float]:
    """Return the operations of all trained MTP layers, by token and by pair, in both passes.

    The output layer is the model's, which gets no gradient of its weights here.

    mlp        multiplications per token of the last layer's experts or MLP
    per_pair   operations of attention of a layer
    """
    sizes = facts.sizes
    num_layers, hidden = sizes["mtp_layers"], sizes["hidden"]
    own = _count_attention(facts) + mlp + hidden * sizes["mtp_in"]
    per_token = 2.0 * ((1 + BACKWARD) * own + BACKWARD * hidden * sizes["vocab"])
    return num_layers * per_token, num_layers * (1 + BACKWARD) * per_pair


def _count_attention(facts: ModelFacts) -> int:
    """Return the multiplications per token of a layer's projections."""
    sizes = facts.sizes
    hidden = sizes["hidden"]
    if "kv_rank" not in sizes:
        gate = hidden * (sizes.get("gated_q", sizes["q"]) - sizes["q"])
        return 2 * hidden * (sizes["q"] + sizes["kv"]) + gate
    rank = sizes["q_rank"]
    queries = rank * (hidden + sizes["q"]) if rank else hidden * sizes["q"]
    keys = hidden * sizes["kv_down"] + sizes["kv_rank"] * sizes["kv_up"]
    return queries + keys + sizes["v"] * hidden


def _count_delta_net(facts: ModelFacts) -> int:
    """Return the multiplications per token of a gated delta net.

    They are those of the projections, of the convolution, and, token by token, of a state with a
    key, with the change that it makes, and with a query. Kernels compute chunks and multiply more.
    """
    sizes = facts.sizes
    projections = sizes["delta_qkvz"] + sizes["delta_ba"] + sizes["delta_values"]
    state = sizes["delta_values"] * sizes["delta_keys"] // sizes["delta_key_heads"]
    return sizes["hidden"] * projections + sizes["delta_qkv"] * sizes["delta_kernel"] + 3 * state


def _count_mamba(facts: ModelFacts) -> int:
    """Return the multiplications per token of a Mamba-2 layer.

    They are those of the projections, of the convolution, and, token by token, of a state with its
    decay, of a key with a value, and of the state with a query. Kernels multiply more.
    """
    sizes = facts.sizes
    projections = sizes["mamba_in"] + sizes["mamba_inner"]
    state = sizes["mamba_inner"] * sizes["mamba_state"] // sizes["mamba_groups"]
    return sizes["hidden"] * projections + sizes["mamba_conv"] * sizes["mamba_kernel"] + 3 * state


def _count_matrices(facts: ModelFacts) -> int:
    """Return the matrices of an MLP: gate, up and down, or two without a gate."""
    return 3 if facts.family.options(facts.config).get("gated_linear_unit", True) else 2


def _count_experts(facts: ModelFacts) -> int:
    """Return the multiplications per token of a layer's router and experts."""
    sizes = facts.sizes
    hidden = sizes["hidden"]
    shared = sizes.get("shared_ffn", 0)
    has_gate = facts.family.options(facts.config).get("moe_shared_expert_gate", False)
    gate = hidden if has_gate else 0
    routed = facts.experts_per_token * sizes["expert_ffn"] * sizes.get("expert_in", hidden)
    latent = 2 * hidden * sizes.get("latent", 0)
    matrices = _count_matrices(facts) * (routed + hidden * shared)
    return hidden * sizes["experts"] + matrices + gate + latent


def _find_window(facts: ModelFacts) -> int | None:
    """Return how many tokens a query sees in layers with a sliding window; None without any."""
    return facts.config.get("sliding_window") if facts.config.get("layer_types") else None


def _count_pairs(num_tokens: int, window: int) -> int:
    """Return the pairs of a query and a key, itself or at most `window` - 1 tokens before it."""
    whole = min(num_tokens, window)
    return whole * (whole + 1) // 2 + (num_tokens - whole) * window


PER_PATCH = (PREFIX + "blocks.", PREFIX + "patch_embed.")
"""Where keys of tensors begin that every patch is multiplied with; the rest multiply tokens."""
TABLES = {"tower_positions", "tower_rows"}
"""Axes of tables, whose rows are looked up."""
WITH_WINDOWS = "Qwen2_5_VL"
WINDOW, WHOLE_BLOCKS = 112, (7, 15, 23, 31)
"""Pixels along its windows, and its blocks without windows, if config.json does not name them."""

Grid = Sequence[int]
"""Frames, rows and columns of an image's patches."""


@dataclass(frozen=True)
class TowerFlops:
    """Floating-point operations of a tower's forward pass.

    per_patch         of all products with weights in the blocks and before them
    per_token         of all products with weights in projectors, by token of the language model
    per_pair          of two patches of a frame, in all blocks that see whole frames
    per_window_pair   of two patches of a window, in all blocks with windows
    merge             patches along each side that become one token
    window            patches along each side of a window
    """

    per_patch: float
    per_token: float
    per_pair: float
    per_window_pair: float
    merge: int
    window: int

    @staticmethod
    def from_facts(facts: ModelFacts) -> "TowerFlops | None":
        """Return the operations of a model's tower; None if it has none."""
        if not facts.has_tower:
            return None
        sizes = facts.sizes
        merge = merge_size(facts.config)
        vision = read_vision_settings(facts.config)
        num_whole = _count_whole_blocks(facts)
        per_block = 4.0 * sizes["tower_hidden"]  # queries with keys, and weights with values
        window = vision.get("window_size", WINDOW) // sizes["patch"] // merge * merge
        return TowerFlops(
            per_patch=2.0 * _count_matrix_numbers(facts, per_patch=True),
            per_token=2.0 * _count_matrix_numbers(facts, per_patch=False),
            per_pair=num_whole * per_block,
            per_window_pair=(sizes["tower_blocks"] - num_whole) * per_block,
            merge=merge,
            window=window,
        )

    def blocks(self, grids: Iterable[Grid]) -> float:
        """Return the operations of a forward pass apart from projectors."""
        operations = 0.0
        for frames, rows, columns in grids:
            operations += self.per_patch * frames * rows * columns
            operations += self.per_pair * frames * (rows * columns) ** 2
            if self.per_window_pair:
                in_windows = _sum_squares(rows, self.window) * _sum_squares(columns, self.window)
                operations += self.per_window_pair * frames * in_windows
        return operations

    def projectors(self, grids: Iterable[Grid]) -> float:
        """Return the operations of a forward pass through projectors."""
        num_patches = sum(frames * rows * columns for frames, rows, columns in grids)
        return self.per_token * num_patches / self.merge**2

    def count_forward(self, grids: Iterable[Grid]) -> float:
        """Return the operations of a forward pass over images of these grids."""
        grids = list(grids)
        return self.blocks(grids) + self.projectors(grids)

    def count_training(self, grids: Iterable[Grid], part: str) -> float:
        """Return the operations of a forward pass, and of the backward pass of what is trained.

        Recomputed activations are not counted.

        part   train.vision; what it leaves out has no backward pass
        """
        grids = list(grids)
        backward = {
            "all": self.count_forward(grids),
            "projector": self.projectors(grids),
            "none": 0.0,
        }
        return self.count_forward(grids) + BACKWARD * backward[part]

    def square(self, num_tokens: int) -> Grid:
        """Return the grid of the most nearly square image of so many tokens."""
        rows = next(n for n in range(int(num_tokens**0.5), 0, -1) if num_tokens % n == 0)
        return 1, self.merge * rows, self.merge * (num_tokens // rows)


def _count_matrix_numbers(facts: ModelFacts, *, per_patch: bool) -> int:
    """Return the numbers of the matrices that patches, or else tokens, are multiplied with."""
    sizes = facts.sizes
    total = 0
    for rule, tensor, _, _ in facts.family.places(facts.config, sizes):
        if not rule.key.startswith(PREFIX) or len(tensor.axes) < 2 or TABLES & set(tensor.axes):
            continue
        if rule.key.startswith(PER_PATCH) == per_patch:
            total += prod(sizes[axis] for axis in tensor.axes)
    return total


def _count_whole_blocks(facts: ModelFacts) -> int:
    """Return the blocks whose patches see all others of their frame."""
    blocks = range(facts.sizes["tower_blocks"])
    if find_stem(facts.architecture) != WITH_WINDOWS:
        return len(blocks)
    whole = read_vision_settings(facts.config).get("fullatt_block_indexes", WHOLE_BLOCKS)
    return len(set(whole) & set(blocks))


def _sum_squares(length: int, window: int) -> int:
    """Return the sum of the squares of the parts into which windows cut a side."""
    rest = length % window
    return length // window * window**2 + rest**2
