"""config.json and sizes of SGLang's engines in, where their ranks hold the HF tensors out, in closed form.

    rank = engine * (TP * PP) + pp * TP + tp     attention: tp % (TP / DP), replicated over its DP groups
                                                 experts: ep = tp // (TP / EP), cut over the TP / EP in it

Recorded of SGLang 0.5.23 (runtime_context.derive_spawn_ranks, layers/linear.py, layers/moe, get_pp_indices).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from mcore_rl.slices.families.table import Family, HfConfig, Shape
from mcore_rl.slices.layouts.layout import Piece, Placement
from mcore_rl.slices.layouts.ranks import Ranks
from mcore_rl.slices.layouts.staged import StagedLayout
from mcore_rl.slices.layouts.tensors import Entry, Tensors, cut_evenly, cut_rows, divide

VOCAB_MULTIPLE = 64
ROWS, COLUMNS = 0, 1


@dataclass(frozen=True)
class Rule:
    """Which group of ranks cuts a tensor along which axis; "all" cuts nothing."""

    group: Literal["all", "attention", "kv_heads", "tensor"]
    axis: int = ROWS


WHOLE = Rule("all")
RULES: Mapping[str, Rule] = {
    "model.embed_tokens": Rule("attention"),
    "lm_head": Rule("tensor"),
    "model.norm": WHOLE,
    "input_layernorm": WHOLE,
    "post_attention_layernorm": WHOLE,
    "self_attn.q_proj": Rule("attention"),
    "self_attn.k_proj": Rule("kv_heads"),
    "self_attn.v_proj": Rule("kv_heads"),
    "self_attn.o_proj": Rule("attention", COLUMNS),
    "self_attn.q_norm": WHOLE,
    "self_attn.k_norm": WHOLE,
    "self_attn.q_a_proj": WHOLE,
    "self_attn.q_a_layernorm": WHOLE,
    "self_attn.q_b_proj": Rule("attention"),
    "self_attn.kv_a_proj_with_mqa": WHOLE,
    "self_attn.kv_a_layernorm": WHOLE,
    "self_attn.kv_b_proj": Rule("attention"),
    "mlp.gate": WHOLE,
    "mlp.gate_proj": Rule("tensor"),
    "mlp.up_proj": Rule("tensor"),
    "mlp.down_proj": Rule("tensor", COLUMNS),
    "mlp.shared_experts.gate_proj": Rule("tensor"),
    "mlp.shared_experts.up_proj": Rule("tensor"),
    "mlp.shared_experts.down_proj": Rule("tensor", COLUMNS),
}
"""Module of a HF tensor, from within the layer on -> who cuts it; routed experts have a rule of their own."""

EXPERT_AXIS = {"gate_proj": ROWS, "up_proj": ROWS, "down_proj": COLUMNS}


HEAD_ON_EVERY_STAGE = {"Qwen3MoeForCausalLM", "LlamaForCausalLM"}
"""Architectures whose pipeline stages all have the output layer."""

WITHOUT_ATTENTION_DP = {"LlamaForCausalLM", "Qwen2ForCausalLM"}
WITHOUT_TIED_HEAD = {"Qwen3MoeForCausalLM"}
WITHOUT_TIED_HEAD_IN_STAGES = {"LlamaForCausalLM"}
WITHOUT_DENSE_LAYERS = {"Qwen3MoeForCausalLM"}
"""What SGLang's models of these architectures cannot do."""


@dataclass(frozen=True)
class SGLangSizes:
    """`engines` engines alike, each of tp * pp ranks.

    dp   groups that attention is replicated over (--enable-dp-attention --dp-size), within the tp ranks
    """

    engines: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def engine_ranks(self) -> int:
        return self.tp * self.pp


class SGLangLayout(StagedLayout):
    """ValueError names the two numbers where the sizes do not divide the model."""

    def __init__(self, family: Family, hf_config: HfConfig, sizes: SGLangSizes, dtype: str) -> None:
        tensors = Tensors(family, hf_config, dtype)
        self._sizes = sizes
        _refuse_unsupported(tensors, sizes)
        self._moe_tp = divide(sizes.tp, sizes.ep, "engine's tp", "ep")
        self._attn_tp = divide(sizes.tp, sizes.dp, "engine's tp", "attention dp")
        divide(tensors.num_heads, self._attn_tp, "attention heads", "engine's tp / dp")
        experts_per_rank = divide(tensors.num_experts, sizes.ep, "experts", "engine's ep")
        self._stages = [_stage_layers(tensors.num_layers, pp, sizes.pp) for pp in range(sizes.pp)]
        stage_of = {layer: pp for pp, layers in enumerate(self._stages) for layer in layers}
        super().__init__(tensors, stage_of, experts_per_rank)

    @property
    def num_ranks(self) -> int:
        return self._sizes.engines * self._sizes.engine_ranks

    def _seat(self, rank: int) -> tuple[Iterable[int], int]:
        stage, tp = divmod(rank % self._sizes.engine_ranks, self._sizes.tp)
        return self._stages[stage], tp // self._moe_tp

    def _make_placement(self, entry: Entry, stage: int | None, ep: int | None) -> Placement:
        stages = self._model_stages(entry) if stage is None else [stage]
        cuts = self._expert_cuts(entry) if ep is not None else self._cuts(entry)
        pieces = []
        for part, box in enumerate(cuts):
            if box is None:
                continue
            ranks = self._ranks(entry, stages[0], ep, part, len(cuts))
            for other in stages[1:]:
                ranks = _interleave(ranks, self._ranks(entry, other, ep, part, len(cuts)))
            pieces.append(Piece(*box, ranks, entry.dtype))
        return Placement(tuple(pieces))

    def _model_stages(self, entry: Entry) -> list[int]:
        last = self._sizes.pp - 1
        if entry.tensor.name == "lm_head.weight" and self._tensors.family.architecture in HEAD_ON_EVERY_STAGE:
            return list(range(last + 1))
        if entry.tensor.name != "model.embed_tokens.weight":
            return [last]
        return [0, last] if self._tensors.tied and last else [0]

    def _cuts(self, entry: Entry) -> list[tuple[Shape, Shape] | None]:
        rule, sizes = _rule(entry), self._sizes
        where = f"SGLang's {entry.suffix}"
        attn_tp = self._attn_tp
        if rule.group == "all":
            return list(cut_evenly(entry.shape, None, 1, where))
        parts = sizes.tp if rule.group == "tensor" else attn_tp
        if entry.rule.padded:
            multiple = VOCAB_MULTIPLE
            if -(-entry.shape[0] // multiple) * multiple % parts:
                multiple *= parts
            return cut_rows(entry.shape, -(-entry.shape[0] // multiple) * multiple // parts, parts)
        if rule.group == "kv_heads":
            heads = self._tensors.sizes["kv_heads"]
            if attn_tp > heads:
                divide(attn_tp, heads, "engine's tp / dp", "key-value heads")
            parts = min(attn_tp, heads)
        return list(cut_evenly(entry.shape, rule.axis, parts, where))

    def _expert_cuts(self, entry: Entry) -> list[tuple[Shape, Shape] | None]:
        axis = EXPERT_AXIS[entry.suffix.split(".")[-2]]
        parts = self._moe_tp
        return list(cut_evenly(entry.shape, axis, parts, f"SGLang's {entry.suffix}"))

    def _ranks(self, entry: Entry, stage: int, ep: int | None, part: int, parts: int) -> Ranks:
        """The ranks of a stage, in all engines, that hold part number `part` of `parts`."""
        sizes, first = self._sizes, stage * self._sizes.tp
        engines = (sizes.engines, sizes.engine_ranks)
        if ep is not None:
            return Ranks.grid(first + ep * parts + part, engines)
        group = _rule(entry).group
        if group == "all":
            return Ranks.grid(first, engines, (sizes.tp, 1))
        if group == "tensor":
            return Ranks.grid(first + part, engines)
        replicas = self._attn_tp // parts
        return Ranks.grid(first + part * replicas, engines, (sizes.dp, self._attn_tp), (replicas, 1))


def _refuse_unsupported(tensors: Tensors, sizes: SGLangSizes) -> None:
    architecture, tied = tensors.family.architecture, tensors.tied
    if architecture in WITHOUT_DENSE_LAYERS and not tensors.all_moe:
        raise ValueError(f"mlp_only_layers: SGLang's {architecture} has experts in every layer")
    if sizes.dp > 1 and architecture in WITHOUT_ATTENTION_DP:
        raise ValueError(f"attention dp = {sizes.dp}: SGLang's {architecture} has no DP attention")
    if tied and architecture in WITHOUT_TIED_HEAD:
        raise ValueError(
            f"tie_word_embeddings = true: SGLang's {architecture} has an output layer of its own"
        )
    if tied and sizes.pp > 1 and architecture in WITHOUT_TIED_HEAD_IN_STAGES:
        raise ValueError(
            f"tie_word_embeddings = true and pp = {sizes.pp}: SGLang's {architecture} lacks a head"
        )


def _rule(entry: Entry) -> Rule:
    """ValueError names a tensor whose place in SGLang is not recorded."""
    module, _, kind = entry.suffix.rpartition(".")
    if kind == "e_score_correction_bias":
        return WHOLE
    if module not in RULES:
        raise ValueError(f"how SGLang cuts {entry.tensor.name!r} is not recorded")
    rule = RULES[module]
    return WHOLE if kind == "bias" and rule.axis == COLUMNS else rule


def _stage_layers(num_layers: int, pp: int, num_stages: int) -> range:
    """As get_pp_indices has it: the last stages take the layers that are left over."""
    base, extra = divmod(num_layers, num_stages)
    longer = max(0, pp - (num_stages - extra))
    first = pp * base + longer
    return range(first, first + base + (pp >= num_stages - extra))


def _interleave(a: Ranks, b: Ranks) -> Ranks:
    """Both; stages of several engines lie in turn."""
    return Ranks.of([*a, *b])
