"""Computes the engines' layout in closed form from config.json and the sizes of SGLang's engines.

    rank = engine * (TP * PP) + pp * TP + tp

    one stage, TP = 4, DP = 2, EP = 2    tp   0  1  2  3
    attention part tp %  (TP / DP)            0  1  0  1    replicated over the DP groups
    expert group   tp // (TP / EP)            0  0  1  1    experts are dealt out over the EP groups
    part of expert tp %  (TP / EP)            0  1  0  1    and cut over the ranks of a group

Source: SGLang 0.5.23 (runtime_context.derive_spawn_ranks, layers/linear.py, layers/moe,
get_pp_indices).
"""

from collections.abc import Iterable

from mcore_rl.weights.layouts.layout import (
    COLUMNS,
    WHOLE,
    EngineRule,
    PlacedPiece,
    Placement,
    Ranks,
)
from mcore_rl.weights.layouts.sglang_models import (
    DENSE_MLP,
    DTYPES,
    EMBEDDING_ON_EVERY_STAGE,
    EXPERT_AXIS,
    EXPERT_BIASES,
    HEAD_ON_EVERY_STAGE,
    RULES,
    RULES_OF,
    SHARED_EXPERTS,
    WITH_WHOLE_EMBEDDING_BY_DP,
    SGLangSizes,
    refuse_unserved,
)
from mcore_rl.weights.layouts.sglang_towers import VOCAB_MULTIPLE, cut_tower, find_tower_rule
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
from mcore_rl.weights.models.table import EMBEDDING, Family, HfConfig, Shape


class SGLangLayout(StagedLayout):
    """The layout of all engines' ranks; raises ValueError if the sizes do not divide the model."""

    def __init__(self, family: Family, hf_config: HfConfig, sizes: SGLangSizes, dtype: str) -> None:
        tensors = Tensors(family, hf_config, dtype)
        self._sizes = sizes
        refuse_unserved(hf_config, sizes)
        self._moe_tp = divide(sizes.tp, sizes.ep, "engine's tp", "ep")
        self._attn_tp = divide(sizes.tp, sizes.dp, "engine's tp", "attention dp")
        divide(tensors.num_heads, self._attn_tp, "attention heads", "engine's tp / dp")
        experts_per_rank = divide(tensors.num_experts, sizes.ep, "experts", "engine's ep")
        self._stages = [
            _list_stage_layers(tensors.num_layers, pp, sizes.pp) for pp in range(sizes.pp)
        ]
        stage_of = {layer: pp for pp, layers in enumerate(self._stages) for layer in layers}
        super().__init__(tensors, stage_of, experts_per_rank)

    @property
    def num_ranks(self) -> int:
        return self._sizes.engines * self._sizes.engine_ranks

    def _layers_and_group(self, rank: int) -> tuple[Iterable[int], int]:
        stage, tp = divmod(rank % self._sizes.engine_ranks, self._sizes.tp)
        return self._stages[stage], tp // self._moe_tp

    def _make_placement(self, entry: Entry, stage: int | None, ep: int | None) -> Placement:
        stages = self._model_stages(entry) if stage is None else [stage]
        cuts = self._expert_cuts(entry) if ep is not None else self._cuts(entry)
        pieces = []
        for part, boxes in enumerate(cuts):
            ranks = self._ranks(entry, stages[0], ep, part, len(cuts))
            for other in stages[1:]:
                ranks = _interleave(ranks, self._ranks(entry, other, ep, part, len(cuts)))
            for box in boxes:
                span = self._experts_of(entry, ep, box)
                pieces.append(PlacedPiece(*span, ranks, self._dtype(entry)))
        return Placement(tuple(pieces))

    def _model_stages(self, entry: Entry) -> list[int]:
        """Return the stages that hold a tensor outside the layers."""
        last = self._sizes.pp - 1
        architecture = self._tensors.family.architecture
        everywhere = list(range(last + 1))
        if entry.rule.key.startswith(tower.PREFIX):
            of_tower = find_tower_rule(architecture, entry)
            return [0] if of_tower and of_tower.is_first else everywhere
        if entry.tensor.name == "lm_head.weight" and architecture in HEAD_ON_EVERY_STAGE:
            return everywhere
        if entry.rule.key != EMBEDDING:
            return [last]
        if architecture in EMBEDDING_ON_EVERY_STAGE:
            return everywhere
        return [0, last] if self._tensors.tied and last else [0]

    def _cuts(self, entry: Entry) -> list[list[tuple[Shape, Shape]]]:
        """Return the boxes (start, stop) of each part of a tensor; none where all is padding."""
        rule = self._rule(entry)
        where = f"SGLang's {entry.suffix}"
        attn_tp = self._attn_tp
        if rule.group == "all":
            return _list_single_boxes(cut_evenly(entry.shape, None, 1, where))
        parts = self._sizes.tp if rule.group == "tensor" else attn_tp
        if entry.rule.padded:
            rows = _pad_rows(entry.shape[0], parts) // parts
            return _list_single_boxes(cut_rows(entry.shape, rows, parts))
        if entry.rule.key.startswith(tower.PREFIX):
            return cut_tower(entry.shape, rule, parts, where)
        if rule.sections:
            return cut_blocks(entry, self._tensors.sizes, parts)
        if rule.group == "kv_heads":
            heads = self._tensors.sizes["kv_heads"]
            if attn_tp > heads:
                divide(attn_tp, heads, "engine's tp / dp", "key-value heads")
            parts = min(attn_tp, heads)
        return _list_single_boxes(cut_evenly(entry.shape, rule.axis, parts, where))

    def _expert_cuts(self, entry: Entry) -> list[list[tuple[Shape, Shape]]]:
        axis = EXPERT_AXIS[".".join(entry.suffix.split(".")[-2:])]
        if entry.rule.upright:
            assert axis is not None
            axis = {1: 2, 2: 1}[axis]
        where = f"SGLang's {entry.suffix}"
        if entry.rule.halves:
            return cut_halves(entry.shape, axis, self._moe_tp, where)
        return _list_single_boxes(cut_evenly(entry.shape, axis, self._moe_tp, where))

    def _ranks(self, entry: Entry, stage: int, ep: int | None, part: int, parts: int) -> Ranks:
        """Return the ranks of a stage, in all engines, that hold part number `part` of `parts`."""
        sizes = self._sizes
        first = stage * sizes.tp
        engines = (sizes.engines, sizes.engine_ranks)
        if ep is not None:
            return Ranks.grid(first + ep * self._moe_tp + part, engines)
        group = self._rule(entry).group
        if group == "all":
            return Ranks.grid(first, engines, (sizes.tp, 1))
        if group == "tensor":
            return Ranks.grid(first + part, engines)
        replicas = self._attn_tp // parts
        return Ranks.grid(
            first + part * replicas, engines, (sizes.dp, self._attn_tp), (replicas, 1)
        )

    def _rule(self, entry: Entry) -> EngineRule:
        """Return how SGLang cuts a tensor. Raises ValueError if that is not recorded."""
        module, _, kind = entry.suffix.rpartition(".")
        if kind in EXPERT_BIASES:
            return WHOLE
        module = "self_attn.sinks" if kind == "sinks" else module.replace("language_model.", "")
        sizes = self._sizes
        if module == "lm_head" and sizes.head_by_dp:
            return EngineRule("attention")
        if sizes.whole_dense_layers and module in DENSE_MLP:
            return WHOLE
        if sizes.whole_shared_experts and module.startswith(SHARED_EXPERTS):
            return WHOLE
        architecture = self._tensors.family.architecture
        has_whole_embedding = sizes.dp > 1 and architecture in WITH_WHOLE_EMBEDDING_BY_DP
        if module == "model.embed_tokens" and has_whole_embedding:
            return WHOLE
        rule = find_tower_rule(architecture, entry)
        if rule is None:
            rule = RULES_OF.get(architecture, {}).get(module) or RULES.get(module)
        elif sizes.whole_tower:
            return WHOLE
        if rule is None:
            raise ValueError(f"how SGLang cuts {entry.tensor.name!r} is not recorded")
        return WHOLE if kind == "bias" and rule.axis == COLUMNS else rule

    def _dtype(self, entry: Entry) -> str:
        return DTYPES.get((self._tensors.family.architecture, entry.suffix), entry.dtype)


def _list_single_boxes(
    cuts: Iterable[tuple[Shape, Shape] | None],
) -> list[list[tuple[Shape, Shape]]]:
    """Return the boxes of parts that have one box, or none, each."""
    return [[box] if box is not None else [] for box in cuts]


def _pad_rows(num_rows: int, parts: int) -> int:
    """Return the rows of a vocabulary table with SGLang's padding, which `parts` divides."""
    multiple = VOCAB_MULTIPLE
    if -(-num_rows // multiple) * multiple % parts:
        multiple *= parts
    return -(-num_rows // multiple) * multiple


def _list_stage_layers(num_layers: int, pp: int, num_stages: int) -> range:
    """Return the layers of stage `pp`; the last stages take the layers left over.

    Source: SGLang's get_pp_indices.
    """
    base, extra = divmod(num_layers, num_stages)
    longer = max(0, pp - (num_stages - extra))
    first = pp * base + longer
    return range(first, first + base + (pp >= num_stages - extra))


def _interleave(a: Ranks, b: Ranks) -> Ranks:
    """Return the ranks of both; with several engines, the ranks of two stages alternate."""
    return Ranks.from_iterable([*a, *b])
