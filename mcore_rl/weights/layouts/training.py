"""Translates Megatron's description of a rank's tensors into shards of HF tensors.

    LocalPart, from sharded_state_dict                 shards
    linear_qkv, rows 4-7 of q0 q1 k0 v0 q2 q3 k1 v1    q_proj box q2 q3   offset 0
                               part: q2 q3 k1 v1  -->  k_proj box k1      offset 2 rows
                                                       v_proj box v1      offset 3 rows

The family's table says in which order the rows of HF tensors lie in a Megatron tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from mcore_rl.weights.box import Box, Padding, Shard, contiguous_strides
from mcore_rl.weights.models.table import Block, Family, HfConfig, HfTensor, Rule, Shape


@dataclass(frozen=True)
class LocalPart:
    """A box of a global Megatron tensor that lies contiguously in a local tensor.

    key             Megatron's global key
    global_shape    elements per axis of the global tensor
    global_offset   where the box begins on each axis
    local_shape     elements of the box per axis
    tensor          name of the local tensor
    dtype           torch name of its dtype, such as "bfloat16"
    offset          elements of the local tensor before the box (gate and up are two parts)

    The axes of layer and expert, if there are such, come first and have local size 1.
    """

    key: str
    global_shape: Shape
    global_offset: Shape
    local_shape: Shape
    tensor: str
    dtype: str
    offset: int = 0

    def __post_init__(self) -> None:
        if not len(self.global_shape) == len(self.global_offset) == len(self.local_shape):
            raise ValueError(
                f"{self.key}: global shape {self.global_shape}, offset {self.global_offset} and"
                f" local shape {self.local_shape} differ in their number of axes"
            )


@dataclass(frozen=True)
class _Matrix:
    """A part without its axes of layer and expert, which `numbers` has instead ({"layer": 3})."""

    part: LocalPart
    rule: Rule
    numbers: Mapping[str, int]
    global_shape: Shape
    start: Shape
    shape: Shape


def make_training_shards(
    parts: Sequence[LocalPart], family: Family, hf_config: HfConfig
) -> list[Shard]:
    """Return the shards that one training rank holds, in the order of `parts`.

    Raises ValueError naming a Megatron tensor that is unknown or has another shape than config.json
    says.
    """
    return [
        _make_shard(matrix, block.tensor, block.hf_start + first - block.start, first, stop)
        for matrix, block, first, stop in _cut(parts, family, hf_config)
        if block.tensor is not None
    ]


def list_training_padding(
    parts: Sequence[LocalPart], family: Family, hf_config: HfConfig
) -> list[Padding]:
    """Return the vocabulary padding that one training rank holds."""
    padding = []
    padded = [part for part in parts if family.find(part.key)[0].padded]
    for matrix, block, first, stop in _cut(padded, family, hf_config):
        if block.tensor is None:
            row_len = contiguous_strides(matrix.shape)[0]
            offset = matrix.part.offset - matrix.start[0] * row_len
            numel = (stop - first) * row_len
            padding.append(Padding(matrix.part.tensor, offset + first * row_len, (numel,), (1,)))
    return padding


def _cut(
    parts: Sequence[LocalPart], family: Family, hf_config: HfConfig
) -> Iterator[tuple[_Matrix, Block, int, int]]:
    """Yield (part, block, first, stop): rows [first, stop) of the Megatron tensor lie in both."""
    sizes = family.sizes(hf_config)
    left_out = family.find_left_out(hf_config)
    for part in parts:
        matrix = _make_matrix(part, family, sizes)
        _check_present(matrix, family, hf_config, left_out)
        _check_mtp(matrix, sizes)
        for block in _list_blocks(matrix, sizes):
            first = max(matrix.start[0], block.start)
            stop = min(matrix.start[0] + matrix.shape[0], block.start + block.num_rows)
            if first < stop:
                yield matrix, block, first, stop


def _make_matrix(part: LocalPart, family: Family, sizes: Mapping[str, int]) -> _Matrix:
    """Return the part without its axes of layer and expert. The key may name the layer instead."""
    rule, layer = family.find(part.key)
    numbers = {} if layer is None else {"layer": rule.find_hf_number(layer, sizes)}
    axes = ["layer"] if rule.where != "model" and layer is None else []
    axes += ["expert"] if rule.has_expert_axis else []
    lead = len(axes)
    num_axes = lead + len(rule.matrix_axes(rule.tensors[0]))
    if len(part.local_shape) != num_axes or any(n != 1 for n in part.local_shape[:lead]):
        raise ValueError(
            f"{part.key}: local shape {part.local_shape} should begin with size 1 for each of"
            f" {axes}"
        )
    numbers |= dict(zip(axes, part.global_offset, strict=False))
    return _Matrix(
        part,
        rule,
        numbers,
        part.global_shape[lead:],
        part.global_offset[lead:],
        part.local_shape[lead:],
    )


def _check_present(
    matrix: _Matrix, family: Family, hf_config: HfConfig, left_out: frozenset[str]
) -> None:
    """Raise ValueError if config.json describes a model without this Megatron tensor."""
    where = matrix.rule.where
    layer = matrix.numbers.get("layer")
    if matrix.rule.tensors[0].name in left_out:
        raise ValueError(
            f"{matrix.part.key} has weights of its own, but config.json says tie_word_embeddings ="
            " true: build the model with shared embeddings"
        )
    in_layers = where in ("dense", "moe", "linear", "softmax")
    if in_layers and not family.has_rule(matrix.rule, hf_config, layer or 0):
        raise ValueError(f"{matrix.part.key}: by config.json, layer {layer} is not a {where} layer")


def _check_mtp(matrix: _Matrix, sizes: Mapping[str, int]) -> None:
    """Raise ValueError for a layer for multi-token prediction beyond those of config.json."""
    if matrix.rule.where != "mtp":
        return
    count = sizes["mtp_layers"]
    if matrix.numbers["layer"] - matrix.rule.find_hf_number(0, sizes) >= count:
        raise ValueError(
            f"{matrix.part.key}: by config.json the model has {count} layers for multi-token"
            " prediction"
        )


def _list_blocks(matrix: _Matrix, sizes: Mapping[str, int]) -> Iterator[Block]:
    """Yield the blocks of rows that make up a Megatron tensor, from top to bottom."""
    rule = matrix.rule
    num_rows = rule.count_rows(sizes)
    expected = (num_rows, *(sizes[axis] for axis in rule.matrix_axes(rule.tensors[0])[1:]))
    shape = matrix.global_shape
    is_padded = rule.padded and shape[0] > num_rows
    if shape[1:] != expected[1:] or (shape[0] != num_rows and not is_padded):
        raise ValueError(
            f"{matrix.part.key} has shape {shape}, by config.json it should be {expected}"
        )
    yield from rule.list_blocks(sizes)
    if shape[0] > num_rows:
        yield Block(num_rows, shape[0] - num_rows, None, 0)


def _make_shard(matrix: _Matrix, tensor: HfTensor, hf_first: int, first: int, stop: int) -> Shard:
    """Return the shard of rows [first, stop) of a Megatron tensor: from row `hf_first` on."""
    strides = contiguous_strides(matrix.shape)
    offset = matrix.part.offset + (first - matrix.start[0]) * strides[0]
    start = (hf_first, *matrix.start[1:])
    shape = (stop - first, *matrix.shape[1:])
    if matrix.rule.stacked:
        if not matrix.rule.upright:
            start, shape, strides = start[::-1], shape[::-1], strides[::-1]
        start = (matrix.numbers["expert"], *start)
        shape = (1, *shape)
        strides = (prod(matrix.shape), *strides)
    ends = tuple(at + size for at, size in zip(start, shape, strict=True))
    box = Box(tensor.name.format(**matrix.numbers), start, ends)
    return Shard(box, matrix.part.tensor, offset, strides, matrix.part.dtype)
