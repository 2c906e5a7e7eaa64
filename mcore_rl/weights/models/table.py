"""The parts of a family's table: each rule says which HF tensors make up one Megatron tensor.

    HF                          Megatron, rows from top to bottom
    q_proj = q0 q1 q2 q3
    k_proj = k0 k1         -->  linear_qkv = q0 q1 k0 v0 | q2 q3 k1 v1    2 groups of 3 tensors
    v_proj = v0 v1
    gate_proj, up_proj     -->  linear_fc1 = gate up                      1 group of 2 tensors
    o_proj                 -->  linear_proj = o                           1 group of 1 tensor

A group is the unit that repeats; here each of 2 key-value heads makes one, with its 2 query heads.

Rows of one HF tensor may also be dealt out by section: each head of q_proj may have the rows of
its queries, then those of a gate.

    q_proj = q0 g0 q1 g1   -->  linear_qkv = q0 q1 g0 g1 k v              2 units, sections q and g
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

HfConfig = Mapping[str, Any]
"""The parsed `config.json` of a HuggingFace model directory."""

Shape = tuple[int, ...]
EMBEDDING = "embedding.word_embeddings.weight"
"""Megatron's key of the table of token embeddings."""
NUMBERED_BY: Mapping[str, str] = {
    "tower": "tower_blocks",
    "deepstack": "deepstack_mergers",
    "mtp": "mtp_layers",
}
"""Rule.where of tensors in numbered modules beside the model's layers -> the size that counts
these: parts of a vision tower, and trained layers for multi-token prediction (mtp.py)."""


NUMBERED = r"(.*\.(?:layers|blocks|deepstack_merger_list)\.)"
"""Regular expression of the part of a Megatron key that comes before a number."""


def number_key(key: str, number: int) -> str:
    """Return the Megatron key of a numbered module; `key` is that of the table."""
    return re.sub(NUMBERED, rf"\g<1>{number}.", key, count=1)


@dataclass(frozen=True)
class Section:
    """Some rows of an HF tensor, whose rows are equal units of several sections each.

    rows     name of the size that counts the section's rows, in all units together
    before   names of the sizes of the sections that come before it in a unit, likewise
    units    name of the size that counts the units; None: one unit
    """

    rows: str
    before: tuple[str, ...] = ()
    units: str | None = None


@dataclass(frozen=True)
class HfTensor:
    """An HF tensor of the table; a model in which one of its axes has size 0 does not have it.

    name      HF name, in which {layer} (or module of the tower) and {expert} stand for numbers
    axes      names of the axis sizes (see `Family.sizes`)
    dtype     torch name of the tensor's dtype if it differs from the model's
    section   the rows that are meant, None for all; other sections have entries of their own
    initial   what an untrained model has in it, None: what its name and shape say
    """

    name: str
    axes: tuple[str, ...]
    dtype: str | None = None
    section: Section | None = None
    initial: Literal["zeros", "ones", "log"] | None = None


@dataclass(frozen=True)
class Block:
    """Rows [start, start + num_rows) of a Megatron tensor.

    They are the rows of the HF tensor from `hf_start` on, or padding if `tensor` is None.
    """

    start: int
    num_rows: int
    tensor: HfTensor | None
    hf_start: int


Where = Literal[
    "model", "layer", "dense", "moe", "linear", "softmax", "indexed", "tower", "deepstack", "mtp"
]


@dataclass(frozen=True)
class Rule:
    """A Megatron tensor: on axis 0, every group holds a block of rows of each of `tensors` in turn.

    key       Megatron's global key, without the layer or block number
    tensors   the HF tensors, in the order of their blocks
    where     the layers that have the tensor: all, by kind of MLP (dense, moe) or of attention
              (linear, softmax, and indexed if an indexer chooses the keys of softmax attention);
              "model": it belongs to no layer; a key of NUMBERED_BY: it belongs to each of these
              modules
    groups    name of the size that counts the groups; None: one group
    padded    rows past the last block are vocabulary padding (otherwise they are an error)
    stacked   one HF tensor holds all experts on its first axis; Megatron has one tensor per expert
    upright   each expert of a stacked tensor lies in it as in Megatron, not transposed
    halves    the rows are two halves, each cut by tensor parallelism for itself
    goes_on   HF numbers of these modules go on behind those of the model's layers
    """

    key: str
    tensors: tuple[HfTensor, ...]
    where: Where = "layer"
    groups: str | None = None
    padded: bool = False
    stacked: bool = False
    upright: bool = False
    halves: bool = False
    goes_on: bool = False

    @property
    def has_expert_axis(self) -> bool:
        """Return whether the Megatron tensor belongs to one routed expert."""
        return self.stacked or self.numbers_experts

    @property
    def numbers_experts(self) -> bool:
        """Return whether each expert has an HF tensor of its own, with its number in the name."""
        return "{expert}" in self.tensors[0].name

    def find_hf_number(self, number: int, sizes: Mapping[str, int]) -> int:
        """Return the number in HF names of the layer or module that is `number` in Megatron's."""
        return number + sizes["layers"] if self.goes_on else number

    def matrix_axes(self, tensor: HfTensor) -> tuple[str, ...]:
        """Return the axes of `tensor` in the order that the Megatron tensor has them."""
        if not self.stacked:
            return tensor.axes
        return tensor.axes[1:] if self.upright else tensor.axes[:0:-1]

    def count_rows(self, sizes: Mapping[str, int]) -> int:
        """Return the rows of the Megatron tensor, without padding."""
        return sum(self._count_rows_of(tensor, sizes) for tensor in self.tensors)

    def list_blocks(self, sizes: Mapping[str, int]) -> Iterator[Block]:
        """Yield the blocks of rows that make up the Megatron tensor, from top to bottom."""
        num_groups = sizes[self.groups] if self.groups else 1
        start = 0
        for group in range(num_groups):
            for tensor in self.tensors:
                for num_rows, hf_start in self._list_hf_rows(tensor, sizes, group, num_groups):
                    yield Block(start, num_rows, tensor, hf_start)
                    start += num_rows

    def _count_rows_of(self, tensor: HfTensor, sizes: Mapping[str, int]) -> int:
        return sizes[tensor.section.rows if tensor.section else self.matrix_axes(tensor)[0]]

    def _list_hf_rows(
        self, tensor: HfTensor, sizes: Mapping[str, int], group: int, num_groups: int
    ) -> Iterator[tuple[int, int]]:
        """Yield (number of rows, first row of the HF tensor) of a group's rows of `tensor`."""
        num_rows = self._count_rows_of(tensor, sizes)
        section = tensor.section
        if section is None:
            yield num_rows // num_groups, group * num_rows // num_groups
            return
        num_units = sizes[section.units] if section.units else 1
        before = sum(sizes[name] for name in section.before) // num_units
        unit_len = sizes[tensor.axes[0]] // num_units
        for unit in range(group * num_units // num_groups, (group + 1) * num_units // num_groups):
            yield num_rows // num_units, unit * unit_len + before


@dataclass(frozen=True)
class Family:
    """The table of one architecture. Its functions read config.json.

    They raise ValueError naming a key that config.json lacks.

    sizes          axis sizes by the names that `rules` use
    is_moe_layer   (config, layer) -> whether the layer has experts
    is_linear      (config, layer) -> whether the layer has linear attention, not softmax attention
    kinds          (config, layer) -> the values of Rule.where of the layer's tensors, besides
                   "layer"; None: every layer has an MLP and attention, as the two above say
    options        arguments of megatron-core's TransformerConfig, without layout and precision
    supported      key of config.json -> values that table and Megatron support, besides absence
    rope_types     supported kinds of rotary embedding
    refusal        why a model is refused although each setting is supported; "" if it is not
    carried        regular expression of HF names that a checkpoint may hold beside the model; these
                   tensors are neither trained nor synced
    copies         HF name -> original of tensors that a checkpoint may hold a second time; each is
                   carried, too, but exports have what the original became
    rotary_share   share of a head's width that the rotary embedding rotates
    alternating    whether the rows of an expert's linear_fc1 alternate (gate, up, gate, up) instead
                   of being halves
    explicit       keys that config.json has to have: without one, transformers takes a default of
                   the family's own
    complete       (config) -> config.json with keys that follow from others and may be missing
    mtp_layers     layers for multi-token prediction of the checkpoint that config.json describes
    tied           HF tensors that a model with tied embeddings leaves out -> those used instead
    """

    architecture: str
    rules: tuple[Rule, ...]
    sizes: Callable[[HfConfig], Mapping[str, int]]
    is_moe_layer: Callable[[HfConfig, int], bool]
    options: Callable[[HfConfig], dict[str, Any]]
    supported: Mapping[str, tuple[Any, ...]]
    rope_types: tuple[str, ...] = ("default",)
    refusal: Callable[[HfConfig], str] = lambda config: ""
    carried: Callable[[HfConfig], str] = lambda config: ""
    copies: Callable[[HfConfig], Mapping[str, str]] = lambda config: {}
    is_linear: Callable[[HfConfig, int], bool] = lambda config, layer: False
    kinds: Callable[[HfConfig, int], frozenset[str]] | None = None
    complete: Callable[[HfConfig], dict[str, Any]] = dict
    rotary_share: Callable[[HfConfig], float] = lambda config: 1.0
    mtp_layers: Callable[[HfConfig], int] = lambda config: (
        config.get("num_nextn_predict_layers") or 0
    )
    alternating: bool = False
    explicit: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(
        default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"}
    )

    @property
    def embedding(self) -> str:
        """Return the HF name of the table of token embeddings."""
        [rule] = (rule for rule in self.rules if rule.key == EMBEDDING)
        return rule.tensors[0].name

    @property
    def has_tower(self) -> bool:
        """Return whether the model sees images."""
        return any(rule.where == "tower" for rule in self.rules)

    @property
    def trains_mtp(self) -> bool:
        """Return whether the table has layers for multi-token prediction."""
        return any(rule.where == "mtp" for rule in self.rules)

    @property
    def stacks_experts(self) -> bool:
        """Return whether one HF tensor holds all experts of a layer."""
        return any(rule.stacked for rule in self.rules)

    def find(self, key: str) -> tuple[Rule, int | None]:
        """Return the rule of a Megatron key, and the number of layer, block or merger or None.

        Raises ValueError naming the key if the table does not have it.
        """
        plain = key
        layer = None
        match = re.fullmatch(NUMBERED + r"(\d+)\.(.*)", key)
        if match:
            plain = match[1] + match[3]
            layer = int(match[2])
        for rule in self.rules:
            if rule.key == plain:
                return rule, layer
        raise ValueError(f"Megatron tensor {key!r} is not in the table of {self.architecture}")

    def shapes(self, config: HfConfig) -> dict[str, Shape]:
        """Return HF name -> shape of every tensor of the model."""
        sizes = self.sizes(config)
        return {
            name: tuple(sizes[axis] for axis in tensor.axes)
            for name, tensor in self._tensors(config, sizes)
        }

    def dtypes(self, config: HfConfig, dtype: str) -> dict[str, str]:
        """Return HF name -> torch dtype name of every tensor of a model of dtype `dtype`."""
        return {
            name: tensor.dtype or dtype
            for name, tensor in self._tensors(config, self.sizes(config))
        }

    def list_initial(self, config: HfConfig) -> dict[str, str | None]:
        """Return HF name -> what an untrained model has in the tensor (see HfTensor.initial)."""
        return {name: tensor.initial for name, tensor in self._tensors(config, self.sizes(config))}

    def find_left_out(self, config: HfConfig) -> frozenset[str]:
        """Return the HF tensors that this model lacks because its embeddings are tied."""
        return frozenset(self.tied) if config.get("tie_word_embeddings", False) else frozenset()

    def is_carried(self, config: HfConfig, name: str) -> bool:
        """Return whether a checkpoint may hold tensor `name`, which the Megatron model lacks."""
        pattern = self.carried(config)
        return bool(pattern and re.fullmatch(pattern, name))

    def _tensors(
        self, config: HfConfig, sizes: Mapping[str, int]
    ) -> Iterator[tuple[str, HfTensor]]:
        for _, tensor, layer, expert in self.places(config, sizes):
            yield tensor.name.format(layer=layer, expert=expert), tensor

    def list_kinds(self, config: HfConfig, layer: int) -> frozenset[str]:
        """Return the values of Rule.where of a layer's tensors, besides "layer"."""
        if self.kinds is not None:
            return self.kinds(config, layer)
        mlp = "moe" if self.is_moe_layer(config, layer) else "dense"
        attention = "linear" if self.is_linear(config, layer) else "softmax"
        return frozenset((mlp, attention))

    def has_rule(self, rule: Rule, config: HfConfig, layer: int) -> bool:
        """Return whether a layer of the language model has the tensor of a rule."""
        return rule.where == "layer" or rule.where in self.list_kinds(config, layer)

    def places(
        self, config: HfConfig, sizes: Mapping[str, int]
    ) -> Iterator[tuple[Rule, HfTensor, int | None, int | None]]:
        """Yield (rule, HF tensor, layer or None, expert or None) for every tensor of the model."""
        left_out = self.find_left_out(config)
        for rule in self.rules:
            present = [
                tensor
                for tensor in rule.tensors
                if tensor.name not in left_out and all(sizes[axis] for axis in tensor.axes)
            ]
            if not present:
                continue
            for layer, expert in self._numbers(rule, config, sizes):
                for tensor in present:
                    yield rule, tensor, layer, expert

    def _numbers(
        self, rule: Rule, config: HfConfig, sizes: Mapping[str, int]
    ) -> Iterator[tuple[int | None, int | None]]:
        """Yield the (layer, expert) numbers at which the model has the rule's tensors."""
        if rule.where == "model":
            yield None, None
            return
        experts = range(sizes["experts"]) if rule.numbers_experts else (None,)
        if rule.where in NUMBERED_BY:
            for number in range(sizes[NUMBERED_BY[rule.where]]):
                in_hf = rule.find_hf_number(number, sizes)
                yield from ((in_hf, expert) for expert in experts)
            return
        for layer in range(sizes["layers"]):
            if self.has_rule(rule, config, layer):
                yield from ((layer, expert) for expert in experts)
