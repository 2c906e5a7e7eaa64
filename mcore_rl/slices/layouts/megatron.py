"""config.json and Megatron's parallel sizes in, where its ranks hold the HF tensors out, in closed form.

rank = tp + TP * (cp + CP * (dp + DP * pp))            dense: cut over tp, replicated over cp and dp
     = etp + ETP * (ep + EP * (edp + EDP * pp))        experts: dealt out over ep, cut over etp
model chunk v * PP + pp holds a run of layers          (parallel_state.RankGenerator, order tp-cp-ep-dp-pp)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mcore_rl.config import ParallelConfig
from mcore_rl.slices.families.table import Family, HfConfig, Rule, Shape
from mcore_rl.slices.hf.config import padded_vocab_size
from mcore_rl.slices.layouts.layout import Piece, Placement
from mcore_rl.slices.layouts.ranks import Ranks
from mcore_rl.slices.layouts.staged import StagedLayout
from mcore_rl.slices.layouts.tensors import Entry, Tensors, cut_evenly, cut_rows, divide

ROWS, COLUMNS = 0, -1
SPLIT_AXIS: Mapping[str, int | None] = {
    "embedding.word_embeddings": ROWS,
    "output_layer": ROWS,
    "linear_qkv": ROWS,
    "linear_q_proj": ROWS,
    "linear_q_up_proj": ROWS,
    "linear_kv_up_proj": ROWS,
    "linear_fc1": ROWS,
    "linear_proj": COLUMNS,
    "linear_fc2": COLUMNS,
    "linear_q_down_proj": None,
    "linear_kv_down_proj": None,
    "router": None,
    "final_layernorm": None,
    "input_layernorm": None,
    "pre_mlp_layernorm": None,
    "q_layernorm": None,
    "k_layernorm": None,
    "core_attention": ROWS,
}
"""Megatron module -> the axis of its weight (and bias, if it is the rows) that tensor parallelism cuts."""


@dataclass(frozen=True)
class MegatronSizes:
    """Sizes of the parallel groups, and what else Megatron needs to lay out a model.

    padded_vocab                rows of the embedding with its padding
    first_layers, last_layers   layers of the first and last pipeline stage, where they differ from the others
    """

    padded_vocab: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    first_layers: int | None = None
    last_layers: int | None = None

    @staticmethod
    def of(parallel: ParallelConfig, hf_config: HfConfig) -> "MegatronSizes":
        """The sizes of a recipe's trainer."""
        return MegatronSizes(
            padded_vocab=padded_vocab_size(hf_config, parallel.tp),
            tp=parallel.tp,
            pp=parallel.pp,
            vpp=parallel.vpp,
            cp=parallel.cp,
            dp=parallel.dp_size,
            ep=parallel.ep,
            etp=parallel.etp,
            first_layers=parallel.first_stage_layers,
            last_layers=parallel.last_stage_layers,
        )

    @property
    def stage_ranks(self) -> int:
        return self.tp * self.cp * self.dp


class MegatronLayout(StagedLayout):
    """ValueError names the two numbers where the sizes do not divide the model."""

    def __init__(
        self, family: Family, hf_config: HfConfig, sizes: MegatronSizes, dtype: str
    ) -> None:
        tensors = Tensors(family, hf_config, dtype)
        divide(tensors.num_heads, sizes.tp, "attention heads", "tp")
        self._sizes = sizes
        self._layers = layers_of_chunks(
            tensors.num_layers, sizes.pp, sizes.vpp, sizes.first_layers, sizes.last_layers
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
        """The layers of a pipeline stage, one run for each of its model chunks."""
        return self._layers[stage :: self._sizes.pp]

    def _seat(self, rank: int) -> tuple[Iterable[int], int]:
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
                Piece(*self._experts_of(entry, ep, box), ranks, entry.dtype) for box in boxes
            ]
        return Placement(tuple(pieces))

    def _model_stages(self, rule: Rule) -> list[int]:
        """First or last stage; both for the embeddings that an output layer is tied to."""
        if not rule.key.startswith("embedding."):
            return [self._sizes.pp - 1]
        return [0, self._sizes.pp - 1] if self._tensors.tied and self._sizes.pp > 1 else [0]

    def _ranks(self, entry: Entry, stage: int, ep: int | None, part: int) -> Ranks:
        """The ranks of a stage that hold part number `part`; the only part is on all of them."""
        sizes, first = self._sizes, stage * self._sizes.stage_ranks
        if ep is not None:
            return Ranks.grid(first + ep * sizes.etp + part, (self._edp, sizes.ep * sizes.etp))
        if _split_axis(entry.rule) is None:
            return Ranks.grid(first, (sizes.stage_ranks, 1))
        return Ranks.grid(first + part, (sizes.cp * sizes.dp, sizes.tp))

    def _cut(self, entry: Entry) -> list[list[tuple[Shape, Shape]]]:
        """(start, stop) of the boxes of each part of a tensor."""
        axis = _split_axis(entry.rule)
        parts = self._sizes.etp if entry.rule.has_expert_axis else self._sizes.tp
        if entry.rule.padded:
            rows = divide(self._sizes.padded_vocab, parts, "padded vocabulary", "tp")
            return [[box] if box else [] for box in cut_rows(entry.shape, rows, parts)]
        if entry.rule.groups:
            return self._cut_groups(entry, parts)
        if entry.rule.stacked and axis is not None:
            axis = {ROWS: len(entry.shape) - 1, COLUMNS: 1}[axis]  # behind the experts, transposed
        axis = len(entry.shape) - 1 if axis == COLUMNS else axis
        return [
            [box] for box in cut_evenly(entry.shape, axis, parts, f"Megatron's {entry.rule.key}")
        ]

    def _cut_groups(self, entry: Entry, parts: int) -> list[list[tuple[Shape, Shape]]]:
        """Equal stretches of the rows of a tensor of groups (q k v | q k v), of which `entry` is a part."""
        rule, sizes = entry.rule, self._tensors.sizes
        num_groups = sizes[rule.groups or ""]
        blocks = {tensor.name: sizes[tensor.axes[0]] // num_groups for tensor in rule.tensors}
        names = list(blocks)
        before = sum(blocks[name] for name in names[: names.index(entry.tensor.name)])
        group_len, block_len = sum(blocks.values()), blocks[entry.tensor.name]
        rows = divide(group_len * num_groups, parts, f"rows of {rule.key}", "tp")
        cuts = []
        for part in range(parts):
            first, last = (
                self._row(row, before, block_len, group_len)
                for row in (part * rows, (part + 1) * rows)
            )
            rest = entry.shape[1:]
            cuts.append([((first, *(0 for _ in rest)), (last, *rest))] if first < last else [])
        return cuts

    @staticmethod
    def _row(row: int, before: int, block_len: int, group_len: int) -> int:
        """How many rows of a block's tensor come before row number `row` of the tensor of groups."""
        group, in_group = divmod(row, group_len)
        return group * block_len + min(max(in_group - before, 0), block_len)


def _split_axis(rule: Rule) -> int | None:
    """ValueError names a Megatron tensor whose cut is not recorded."""
    module, _, kind = rule.key.rpartition(".")
    is_value_head = rule.tensors[0].axes[0] == "one"
    if kind in ("layer_norm_weight", "expert_bias", "gate_weight") or is_value_head:
        return None
    for known, axis in SPLIT_AXIS.items():
        if module == known or module.endswith("." + known):
            return axis if kind == "weight" or axis == ROWS else None
    raise ValueError(f"how tensor parallelism cuts Megatron's {rule.key!r} is not recorded")


def layers_of_chunks(
    num_layers: int, pp: int, vpp: int | None, first_layers: int | None, last_layers: int | None
) -> list[range]:
    """The layers of each model chunk, in the order of the chunks (as get_num_layers_to_build has it).

    `first_layers`, `last_layers`: of the first and last pipeline stage, where they differ from the others.
    ValueError names the two numbers that do not divide.
    """
    stages = [first_layers, *[None] * (pp - 2), last_layers] if pp > 1 else [None]
    given = sum(n for n in stages if n is not None)
    middle = sum(n is None for n in stages)
    if middle:
        each = divide(num_layers - given, middle, "layers left", "pipeline stages left")
    elif given != num_layers:
        raise ValueError(
            f"the first and last stage have {given} layers together, the model has {num_layers}"
        )
    else:
        each = 0
    num_chunks = vpp or 1
    per_chunk = [
        divide(each if n is None else n, num_chunks, "layers of a pipeline stage", "vpp")
        for n in stages
    ]
    chunks, first = [], 0
    for _ in range(num_chunks):
        for count in per_chunk:
            chunks.append(range(first, first + count))
            first += count
    return chunks
