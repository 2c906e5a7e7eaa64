"""Computes the bytes of activations per layer and rank, from config.json and a micro-batch.

After Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
section 4, for layers without dropout, with attention that keeps no score matrix, and with experts.

A vision tower's activations and the pixels count on the first stage. Each rank of that stage runs
the whole tower on all images of its micro-batch (docs/vision.md), so neither tensor nor context
parallelism makes them fewer.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from mcore_rl.config.training import WHOLE_LAYERS
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.settings import need
from mcore_rl.weights.models.table import HfConfig
from mcore_rl.weights.models.tower import PREFIX, merge_size

FLOAT32 = 4
LOGITS_COPIES = 3
DELTA_CHUNK_LEN = 64
"""Tokens of a chunk of flash-linear-attention's kernels of gated delta nets."""
MAMBA_CHUNK_LEN = 128
"""Tokens of a chunk of mamba_ssm's kernels, as megatron-core calls them."""
LOSS_CHUNK = 1 << 28
"""Bytes that the loss of indexers takes for a few tokens at once; BYTES_AT_ONCE in its file."""


@dataclass(frozen=True)
class Pass:
    """A micro-batch on one rank.

    tokens          of the whole micro-batch, before context parallelism cuts it
    itemsize        bytes of an activation
    recomputed      modules that the backward pass computes again, as megatron-core names them
    logprob_chunk   tokens whose logits are in memory as float32 at once
    expert_load     tokens of the most loaded rank's experts over the mean
    image_share     tokens that stand for images, as a share of all
    sparse_kernel   whether sparse attention has a fused kernel (train.megatron.dsa_kernel_backend);
                    without one it has the scores of all pairs of tokens
    trains_indexers whether indexers learn (train.indexer_loss)
    """

    tokens: int
    tp: int
    cp: int
    etp: int
    itemsize: int
    recomputed: frozenset[str]
    logprob_chunk: int
    expert_load: float
    sparse_kernel: bool = False
    trains_indexers: bool = False
    image_share: float = 1.0

    @property
    def image_tokens(self) -> float:
        """Tokens of the whole micro-batch that stand for images."""
        return self.tokens * self.image_share


class Activations:
    """Bytes of activations of one model's layers under one `Pass`."""

    def __init__(self, hf_config: HfConfig, step: Pass) -> None:
        self._config = hf_config
        self._step = step
        self._family = family_of(hf_config)
        self._sizes: Mapping[str, int] = self._family.sizes(hf_config)
        self._tokens = step.tokens / step.cp
        self._own = self._tokens / step.tp
        """Tokens of this rank in the parts of a layer that sequence parallelism cuts."""
        self._count_alike = cache(self._count_kinds)

    def count_kept(self, layer: int) -> float:
        """Bytes that a layer keeps from the forward to the backward pass."""
        if self._step.recomputed == WHOLE_LAYERS:
            return self._hidden
        return self._count_inner(layer, self._step.recomputed)

    def count_working(self, layer: int) -> float:
        """Bytes in use besides what is kept, while the layer runs or is recomputed."""
        kinds = self._family.list_kinds(self._config, layer)
        buffers = 0.0
        if "moe" in kinds:
            width = self._expert_in + 2 * self._sizes["expert_ffn"] / self._step.etp
            buffers += 2 * self._routed_tokens * width
        if "dense" in kinds:
            buffers += 4 * self._tokens * self._sizes["dense_ffn"] / self._step.tp
        again = self._count_inner(layer, frozenset())
        if self._step.recomputed != WHOLE_LAYERS:
            again -= self.count_kept(layer)
        if "linear" in kinds:
            again += self._count_states()
        if "indexed" in kinds:
            again += self._count_index_scores() + self._count_indexer_loss()[1]
        return buffers * self._step.itemsize + again

    def count_logits(self, padded_vocab: int) -> float:
        """Bytes of logits and their gradient (last stage), and of a chunk's float32 copies.

        They are the shifted logits, their exponentials, and an entropy bonus' factor.
        """
        width = padded_vocab / self._step.tp
        chunk = min(self._step.logprob_chunk, self._tokens)
        return width * (2 * self._step.itemsize * self._tokens + LOGITS_COPIES * FLOAT32 * chunk)

    def count_drafts(self, padded_vocab: int, pp: int) -> float:
        """Bytes of trained layers for multi-token prediction beside their states (last stage).

        They are activations and logits of one micro-batch, whose backward pass comes next, and with
        several stages a copy of the embedding. Each layer keeps what the model's last one does, its
        two inputs and, unless they are recomputed, the outputs of both norms and of the projection,
        and the input of the norm behind it.
        """
        inputs = (2 if self._step.recomputed == WHOLE_LAYERS else 6) * self._hidden
        kept = self.count_kept(self._sizes["layers"] - 1) + inputs
        each = kept + self.count_logits(padded_vocab)
        copy = padded_vocab / self._step.tp * self._sizes["hidden"] * self._step.itemsize
        return self._sizes["mtp_layers"] * each + (copy if pp > 1 else 0)

    def _count_inner(self, layer: int, recomputed: Collection[str]) -> float:
        """Bytes inside a layer, but for what the modules `recomputed` compute again."""
        kinds = self._family.list_kinds(self._config, layer)
        return self._count_alike(kinds, frozenset(recomputed))

    def _count_kinds(self, kinds: frozenset[str], recomputed: frozenset[str]) -> float:
        """Return the same for all layers of these kinds."""
        count_linear = self._count_mamba if self._has_mamba else self._count_delta_net
        counts = {
            "moe": self._count_experts,
            "dense": self._count_dense,
            "linear": count_linear,
            "softmax": self._count_attention,
            "indexed": self._count_indexer,
        }
        return sum(counts[kind](recomputed) for kind in sorted(kinds))

    @property
    def _has_mamba(self) -> bool:
        return "mamba_in" in self._sizes

    @property
    def _expert_in(self) -> int:
        """Numbers per token that an expert takes."""
        return self._sizes.get("expert_in", self._sizes["hidden"])

    @property
    def _factors(self) -> int:
        """Matrices whose outputs the activation of an MLP takes: gate and up, or one alone."""
        is_gated = self._family.options(self._config).get("gated_linear_unit", True)
        return 2 if is_gated else 1

    @property
    def _hidden(self) -> float:
        return self._own * self._sizes["hidden"] * self._step.itemsize

    def _count_norm(self, recomputed: Collection[str]) -> float:
        """Bytes of a norm's input, and of its output unless that is recomputed."""
        return self._hidden * (1 if "layernorm" in recomputed else 2)

    @property
    def _routed_tokens(self) -> float:
        top_k = need(self._config, "num_experts_per_tok")
        return self._own * top_k * self._step.etp * self._step.expert_load

    def _count_attention(self, recomputed: Collection[str]) -> float:
        """Bytes of queries, keys, values and the output; flash attention keeps no scores."""
        sizes = self._sizes
        step = self._step
        cut = self._tokens / step.tp
        if "kv_rank" in sizes:
            numbers = self._own * (2 * sizes["q_rank"] + 2 * sizes["kv_down"]) + cut * sizes["v"]
            if "index_topk" in sizes:
                return self._count_norm(recomputed) + self._count_sparse(numbers, recomputed)
            if "mla_up_proj" not in recomputed:
                numbers += cut * (2 * sizes["q"] + sizes["kv_up"] + sizes["v"])
        else:
            numbers = cut * (2 * sizes["q"] + 2 * sizes["kv"])
            if sizes["q_norm"]:
                numbers += cut * (sizes["q"] + sizes["kv"])
            numbers += 2 * cut * (sizes.get("gated_q", sizes["q"]) - sizes["q"])
        return self._count_norm(recomputed) + numbers * step.itemsize

    def _count_index_scores(self) -> float:
        """Bytes of the scores of an indexer's heads, and of what they become, without a kernel.

        Tensor-parallel ranks compute the same.
        """
        if self._step.sparse_kernel:
            return 0.0
        pairs = self._tokens * self._step.tokens
        return 2 * FLOAT32 * self._sizes["index_heads"] * pairs

    def _count_indexer(self, recomputed: Collection[str]) -> float:
        """Bytes that an indexer keeps for the backward pass."""
        return 0.0 if "core_attn" in recomputed else self._count_indexer_loss()[0]

    def _count_indexer_loss(self) -> tuple[float, float]:
        """Bytes that the indexer's own loss keeps for the backward pass, and those it works with.

        It keeps its parts with their gradients, and works with attention to the chosen keys and
        with a few tokens at once. Tensor-parallel ranks compute the same.
        """
        if not self._step.trains_indexers:
            return 0.0, 0.0
        numbers = self._sizes["index_q"] + self._sizes["index_head"] + self._sizes["index_heads"]
        kept = self._tokens * numbers * (FLOAT32 + self._step.itemsize)
        return kept, self._tokens * self._sizes["index_topk"] * 2 * FLOAT32 + LOSS_CHUNK

    def _count_sparse(self, numbers: float, recomputed: Collection[str]) -> float:
        """Bytes of attention to chosen keys, beside `numbers` of latent projections and the output.

        Each head has its query and its output in the width of the latent of keys. Without a kernel
        each has float32 probabilities and a copy in the model's dtype for all pairs of tokens.
        """
        sizes = self._sizes
        heads = need(self._config, "num_attention_heads") / self._step.tp
        in_latent = 2 * sizes["kv_rank"] + sizes["kv_down"]
        if "mla_up_proj" not in recomputed:
            numbers += self._tokens * sizes["q"] / self._step.tp
        numbers += self._tokens * heads * in_latent
        scores = 0.0
        if not self._step.sparse_kernel and "core_attn" not in recomputed:
            scores = heads * self._tokens * self._step.tokens * (FLOAT32 + self._step.itemsize)
        return numbers * self._step.itemsize + scores

    def _count_delta_net(self, recomputed: Collection[str]) -> float:
        """Bytes of the projections, the convolution's outputs, queries and keys of every value
        head, values, gates, outputs before and after their norm, and a chunk's triangular matrix.
        """
        sizes = self._sizes
        repeated = sizes["delta_keys"] // sizes["delta_key_heads"] * sizes["delta_heads"]
        numbers = sizes["delta_qkvz"] + sizes["delta_ba"] + sizes["delta_qkv"] + 2 * repeated
        numbers += 4 * sizes["delta_values"] + DELTA_CHUNK_LEN * sizes["delta_heads"]
        cut = self._tokens / self._step.tp
        return self._count_norm(recomputed) + cut * numbers * self._step.itemsize

    def _count_mamba(self, recomputed: Collection[str]) -> float:
        """Bytes of the projections, and of outputs before and after gates and norm.

        The kernel computes the convolution and the scan again in the backward pass.
        """
        numbers = self._sizes["mamba_in"] + 3 * self._sizes["mamba_inner"]
        cut = self._tokens / self._step.tp
        return self._count_norm(recomputed) + cut * numbers * self._step.itemsize

    def _count_states(self) -> float:
        """Bytes of the states at the beginnings of chunks of a Mamba-2 layer, and their gradients.

        They are in float32.
        """
        if not self._has_mamba:
            return 0.0
        sizes = self._sizes
        state = sizes["mamba_inner"] * sizes["mamba_state"] // sizes["mamba_groups"]
        return 2 * FLOAT32 * self._tokens / self._step.tp * state / MAMBA_CHUNK_LEN

    def _count_dense(self, recomputed: Collection[str]) -> float:
        numbers = (self._factors + 1) * self._tokens * self._sizes["dense_ffn"] / self._step.tp
        if "mlp" in recomputed:
            numbers = 0.0
        return self._count_norm(recomputed) + numbers * self._step.itemsize

    def _count_experts(self, recomputed: Collection[str]) -> float:
        """Bytes of the norm, the router's float32 scores, the experts' inputs and their
        matrices' outputs.
        """
        sizes = self._sizes
        step = self._step
        if "moe" in recomputed:
            return self._count_norm(recomputed)
        halves = self._factors + (1 if "moe_act" in recomputed else 2)
        rows = self._routed_tokens * (self._expert_in + halves * sizes["expert_ffn"] / step.etp)
        shared = (self._factors + 1) * self._tokens * sizes.get("shared_ffn", 0) / step.tp
        if "shared_experts" in recomputed:
            shared = 0.0
        scores = 2 * self._own * sizes["experts"] * FLOAT32
        return self._count_norm(recomputed) + scores + (rows + shared) * step.itemsize


GATE = PREFIX + "blocks.mlp.gate_proj.weight"
"""Key of a tensor that only blocks with a gated MLP have."""


def count_tower_activations(
    hf_config: HfConfig, step: Pass, vision: str, in_flight: float
) -> float:
    """Return the bytes of activations of the tower on a micro-batch's images.

    vision      train.vision; blocks that are not trained keep nothing for a backward pass
    in_flight   micro-batches whose activations the stage keeps
    """
    family = family_of(hf_config)
    sizes = family.sizes(hf_config)
    num_patches = step.image_tokens * merge_size(hf_config) ** 2
    hidden = sizes["tower_hidden"]
    # norms' inputs and outputs, queries, keys and values before and after rotation, output; gate,
    # up, activation and product, or the activation's input and output
    is_gated = any(rule.key == GATE for rule in family.rules)
    block = 10 * hidden + (4 if is_gated else 2) * sizes["tower_block_ffn"]
    kept = sizes["tower_blocks"] * (hidden if step.recomputed else block)
    if vision != "all":
        kept = 0
    inner = sizes.get("deepstack_mergers", 0) * _count_inner_feature(
        sizes, step, num_patches, vision
    )
    numbers = num_patches * (in_flight * kept + block) + in_flight * inner
    return numbers * step.itemsize


def count_received_features(
    hf_config: HfConfig, step: Pass, runs: Sequence[range], in_flight: float
) -> float:
    """Return the bytes of inner features that a stage gets from earlier ones.

    runs        the layers of each of its model chunks
    in_flight   micro-batches whose activations the stage keeps in each chunk
    """
    sizes = family_of(hf_config).sizes(hf_config)
    num_features = sizes.get("deepstack_mergers", 0)
    received = sum(max(num_features - run.start, 0) for run in runs if run.start)
    own_tokens = step.tokens / (step.tp * step.cp)
    return in_flight * received * sizes["hidden"] * own_tokens * step.itemsize


def _count_inner_feature(
    sizes: Mapping[str, int], step: Pass, num_patches: float, vision: str
) -> float:
    """Return the numbers that features of one inner block take, with those of their projector.

    Each rank has the features of all images, and those of its own tokens.
    """
    features = sizes["hidden"] * (step.image_tokens + step.tokens / (step.tp * step.cp))
    # the outputs of norm, first layer and activation
    projector = 0 if vision == "none" else 3 * sizes["tower_hidden"] * num_patches
    return features + projector


def count_pixel_bytes(config: HfConfig, num_tokens: float) -> float:
    """Return the bytes of the pixels of images that so many tokens stand for."""
    sizes = family_of(config).sizes(config)
    num_patches = num_tokens * merge_size(config) ** 2
    return num_patches * sizes["channels"] * sizes["patch_frames"] * sizes["patch"] ** 2 * FLOAT32
