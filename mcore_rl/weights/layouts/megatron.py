"""Computes the trainer's layout in closed form from config.json and Megatron's parallel sizes.

    rank = tp + TP * (cp + CP * (dp + DP * pp))      dense: cut over tp, replicated over cp and dp
         = etp + ETP * (ep + EP * (edp + EDP * pp))  experts: dealt out over ep, cut over etp

    pipeline stage          0    1    0    1         PP = 2, VPP = 2
    model chunk             0    1    2    3         chunk v * PP + pp holds a run of layers
    layers of 8             0-1  2-3  4-5  6-7

Source: megatron-core's parallel_state.RankGenerator, order tp-cp-ep-dp-pp.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mcore_rl.config import ParallelConfig
from mcore_rl.weights.hf.config import pad_vocab_size
from mcore_rl.weights.layouts.layout import PlacedPiece, Placement, Ranks
from mcore_rl.weights.layouts.tensors import (
    Entry,
    StagedLayout,
    Tensors,
    cut_blocks,
    cut_evenly,
    cut_halves,
    cut_rows,
    divide,
)
from mcore_rl.weights.models import tower
from mcore_rl.weights.models.table import Family, HfConfig, Rule, Shape

ROWS, COLUMNS = 0, -1
SPLIT_AXIS: Mapping[str, int | None] = {
    "embedding.word_embeddings": ROWS,
    "output_layer": ROWS,
    "linear_qkv": ROWS,
    "linear_q_proj": ROWS,
    "linear_q_up_proj": ROWS,
    "linear_kv_up_proj": ROWS,
    "linear_fc1": ROWS,
    "in_proj.weight": ROWS,
    "conv1d.weight": ROWS,
    "conv1d.bias": ROWS,
    "mixer.norm": ROWS,
    "out_norm": None,
    "out_proj": COLUMNS,
    "linear_proj": COLUMNS,
    "linear_fc2": COLUMNS,
    "eh_proj": ROWS,
    "enorm": None,
    "hnorm": None,
    "linear_q_down_proj": None,
    "linear_kv_down_proj": None,
    "router": None,
    "fc1_latent_proj": None,
    "fc2_latent_proj": None,
    "final_layernorm": None,
    "final_norm": None,
    "input_layernorm": None,
    "pre_mlp_layernorm": None,
    "q_layernorm": None,
    "k_layernorm": None,
    "kv_layernorm": None,
    "indexer.linear_wq_b": None,
    "indexer.linear_wk": None,
    "indexer.k_norm": None,
    "indexer.linear_weights_proj": None,
    "core_attention": ROWS,
}
"""Megatron module -> the axis of its weight that tensor parallelism cuts, None for none.

A bias is cut where the rows of its weight are.
"""


@dataclass(frozen=True)
class MegatronSizes:
    """The sizes that Megatron lays out a model by.

    padded_vocab   rows of the embedding, padding included
    stage_layers   layers of each pipeline stage, or of each model chunk; empty: equally many
    """

    padded_vocab: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    stage_layers: tuple[int, ...] = ()

    @staticmethod
    def from_config(parallel: ParallelConfig, hf_config: HfConfig) -> "MegatronSizes":
        """Return the sizes of a recipe's trainer."""
        return MegatronSizes(
            padded_vocab=pad_vocab_size(hf_config, parallel.tp),
            tp=parallel.tp,
            pp=parallel.pp,
            vpp=parallel.vpp,
            cp=parallel.cp,
            dp=parallel.dp_size,
            ep=parallel.ep,
            etp=parallel.etp,
            stage_layers=tuple(parallel.stage_layers),
        )

    @property
    def stage_ranks(self) -> int:
        return self.tp * self.cp * self.dp


class MegatronLayout(StagedLayout):
    """The layout of the trainer ranks; raises ValueError if the sizes do not divide the model."""

    def __init__(
        self, family: Family, hf_config: HfConfig, sizes: MegatronSizes, dtype: str
    ) -> None:
        tensors = Tensors(family, hf_config, dtype)
        divide(tensors.num_heads, sizes.tp, "attention heads", "tp")
        self._sizes = sizes
        self._layers = list_chunk_layers(
            tensors.num_layers, sizes.pp, sizes.vpp, sizes.stage_layers
        )
        stage_of = {
            layer: chunk % sizes.pp for chunk, layers in enumerate(self._layers) for layer in layers
        }
        self._edp = divide(sizes.stage_ranks, sizes.ep * sizes.etp, "tp * cp * dp", "ep * etp")
        num_experts = tensors.num_experts
        experts_per_rank = divide(num_experts, sizes.ep, "experts", "ep") if num_experts else 0
        super().__init__(tensors, stage_of, experts_per_rank)

    @property
    def num_ranks(self) -> int:
        return self._sizes.stage_ranks * self._sizes.pp

    def stage_layers(self, stage: int) -> list[range]:
        """Return the layers of a pipeline stage, one run for each of its model chunks."""
        return self._layers[stage :: self._sizes.pp]

    def _layers_and_group(self, rank: int) -> tuple[Iterable[int], int]:
        stage, in_stage = divmod(rank, self._sizes.stage_ranks)
        layers = (layer for chunk in self._layers[stage :: self._sizes.pp] for layer in chunk)
        return layers, in_stage // self._sizes.etp % self._sizes.ep

    def _make_placement(self, entry: Entry, stage: int | None, ep: int | None) -> Placement:
        stages = self._model_stages(entry.rule) if stage is None else [stage]
        pieces = []
        for part, boxes in enumerate(self._cut(entry)):
            ranks = self._ranks(entry, stages[0], ep, part)
            for other in stages[1:]:
                ranks = ranks.union(self._ranks(entry, other, ep, part))
            pieces += [
                PlacedPiece(*self._experts_of(entry, ep, box), ranks, entry.dtype) for box in boxes
            ]
        return Placement(tuple(pieces))

    def _model_stages(self, rule: Rule) -> list[int]:
        """Return the stages that hold a tensor outside the layers.

        An embedding that the output layer is tied to lies on the first and on the last stage.
        """
        if rule.key.startswith(tower.PREFIX):  # every rank of the first stage has all of it
            return [0]
        if not rule.key.startswith("embedding."):
            return [self._sizes.pp - 1]
        return [0, self._sizes.pp - 1] if self._tensors.tied and self._sizes.pp > 1 else [0]

    def _ranks(self, entry: Entry, stage: int, ep: int | None, part: int) -> Ranks:
        """Return the ranks of a stage that hold part number `part` of a tensor.

        A tensor that is not cut has one part, which all ranks of the stage hold.
        """
        sizes = self._sizes
        first = stage * sizes.stage_ranks
        if ep is not None:
            return Ranks.grid(first + ep * sizes.etp + part, (self._edp, sizes.ep * sizes.etp))
        if _split_axis(entry.rule) is None:
            return Ranks.grid(first, (sizes.stage_ranks, 1))
        return Ranks.grid(first + part, (sizes.cp * sizes.dp, sizes.tp))

    def _cut(self, entry: Entry) -> list[list[tuple[Shape, Shape]]]:
        """Return the boxes (start, stop) of each part of a tensor."""
        axis = _split_axis(entry.rule)
        parts = self._sizes.etp if entry.rule.has_expert_axis else self._sizes.tp
        if entry.rule.padded:
            rows = divide(self._sizes.padded_vocab, parts, "padded vocabulary", "tp")
            return [[box] if box else [] for box in cut_rows(entry.shape, rows, parts)]
        if entry.rule.groups or entry.tensor.section:
            return cut_blocks(entry, self._tensors.sizes, parts)
        if entry.rule.stacked and axis is not None:  # the first axis is that of experts
            axes = (1, len(entry.shape) - 1)
            rows, columns = axes if entry.rule.upright else axes[::-1]
            axis = rows if axis == ROWS else columns
        axis = len(entry.shape) - 1 if axis == COLUMNS else axis
        where = f"Megatron's {entry.rule.key}"
        if entry.rule.halves:
            return cut_halves(entry.shape, axis, parts, where)
        return [[box] for box in cut_evenly(entry.shape, axis, parts, where)]


def _split_axis(rule: Rule) -> int | None:
    """Return the axis that tensor parallelism cuts, None if it cuts none.

    Raises ValueError naming a Megatron tensor whose cut is not recorded.
    """
    module, _, kind = rule.key.rpartition(".")
    is_value_head = rule.tensors[0].axes[0] == "one"
    if kind in ("layer_norm_weight", "expert_bias", "gate_weight") or is_value_head:
        return None
    if rule.key.startswith(tower.PREFIX):
        return None
    if kind in ("A_log", "D", "dt_bias"):
        return ROWS
    for known, axis in SPLIT_AXIS.items():
        if module == known or module.endswith("." + known):
            return axis if kind == "weight" or axis == ROWS else None
    raise ValueError(f"how tensor parallelism cuts Megatron's {rule.key!r} is not recorded")


def list_chunk_layers(
    num_layers: int, pp: int, vpp: int | None, stage_layers: Sequence[int]
) -> list[range]:
    """Return the layers of each model chunk, in the order of the chunks.

    `stage_layers` are their numbers of layers; empty: equally many. Source: megatron-core's
    get_num_layers_to_build. Raises ValueError naming the two numbers that do not fit.
    """
    num_chunks = pp * (vpp or 1)
    each = 0 if stage_layers else divide(num_layers, num_chunks, "layers", "pp * vpp")
    counts = stage_layers or [each] * num_chunks
    if sum(counts) != num_layers or len(counts) != num_chunks:
        raise ValueError(
            f"{len(counts)} stages with {sum(counts)} layers together: pp * vpp = {num_chunks}, and"
            f" the model has {num_layers} layers"
        )
    stops = list(accumulate(counts))
    return [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]
