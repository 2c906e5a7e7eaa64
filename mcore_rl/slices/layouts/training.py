"""Megatron's own account of its shards in (`LocalPart`, off sharded_state_dict), shards of HF tensors out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from mcore_rl.slices.box import Box, Shard
from mcore_rl.slices.families.table import Family, HfConfig, HfTensor, Rule, Shape
from mcore_rl.slices.plan.coverage import Span, contiguous_strides


@dataclass(frozen=True)
class LocalPart:
    """A box of Megatron's global tensor `key` that lies, contiguous, in local tensor `tensor`.

    global_shape, global_offset, local_shape
             elements per axis of the global tensor; the axes of the layer and of the expert, where there are
             such, come first and have local size 1
    offset   elements of `tensor` before the part (gate and up are two parts)
    dtype    torch name of the local tensor's dtype, such as "bfloat16"
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
                f"{self.key}: global shape {self.global_shape}, offset {self.global_offset} and local shape "
                f"{self.local_shape} differ in rank"
            )


@dataclass(frozen=True)
class _Block:
    """Rows [start, start + num_rows) of a Megatron tensor: those of `tensor` from hf_start on, or padding."""

    start: int
    num_rows: int
    tensor: HfTensor | None
    hf_start: int


@dataclass(frozen=True)
class _Matrix:
    """A part without the axes of layer and expert, which became numbers."""

    part: LocalPart
    rule: Rule
    numbers: Mapping[str, int]
    global_shape: Shape
    start: Shape
    shape: Shape


def training_shards(parts: Sequence[LocalPart], family: Family, hf_config: HfConfig) -> list[Shard]:
    """The HF boxes held by one training rank, in the order of `parts`.

    ValueError names a Megatron tensor that is unknown or whose shape is not what `config.json` says.
    """
    return [
        _shard(matrix, block.tensor, block.hf_start + first - block.start, first, stop)
        for matrix, block, first, stop in _cut(parts, family, hf_config)
        if block.tensor is not None
    ]


def training_padding(parts: Sequence[LocalPart], family: Family, hf_config: HfConfig) -> list[Span]:
    """The vocabulary padding held by one training rank: elements that belong to no HF tensor."""
    spans = []
    for matrix, block, first, stop in _cut(parts, family, hf_config):
        if block.tensor is None:
            row_len = contiguous_strides(matrix.shape)[0]
            offset = matrix.part.offset - matrix.start[0] * row_len
            spans.append(
                Span(matrix.part.tensor, offset + first * row_len, offset + stop * row_len)
            )
    return spans


def _cut(
    parts: Sequence[LocalPart], family: Family, hf_config: HfConfig
) -> Iterator[tuple[_Matrix, _Block, int, int]]:
    """Each part's blocks, with the rows [first, stop) of the Megatron tensor that part and block share."""
    sizes = family.sizes(hf_config)
    left_out = family.left_out(hf_config)
    for part in parts:
        matrix = _matrix(part, family)
        _check_present(matrix, family, hf_config, left_out)
        for block in _blocks(matrix, sizes):
            first = max(matrix.start[0], block.start)
            stop = min(matrix.start[0] + matrix.shape[0], block.start + block.num_rows)
            if first < stop:
                yield matrix, block, first, stop


def _matrix(part: LocalPart, family: Family) -> _Matrix:
    rule, layer = family.find(part.key)
    numbers = {} if layer is None else {"layer": layer}
    axes = ["layer"] if rule.where != "model" and layer is None else []
    axes += ["expert"] if rule.has_expert_axis else []
    lead = len(axes)
    if len(part.local_shape) != lead + len(rule.matrix_axes(rule.tensors[0])) or any(
        n != 1 for n in part.local_shape[:lead]
    ):
        raise ValueError(
            f"{part.key}: local shape {part.local_shape} should begin with size 1 for each of {axes}"
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
    where, layer = matrix.rule.where, matrix.numbers.get("layer")
    if matrix.rule.tensors[0].name in left_out:
        raise ValueError(
            f"{matrix.part.key} has weights of its own, but config.json says tie_word_embeddings = true: "
            "build the model with shared embeddings"
        )
    if where in ("dense", "moe") and family.is_moe_layer(hf_config, layer or 0) != (where == "moe"):
        raise ValueError(f"{matrix.part.key}: by config.json, layer {layer} is not a {where} layer")


def _blocks(matrix: _Matrix, sizes: Mapping[str, int]) -> Iterator[_Block]:
    rule = matrix.rule
    num_groups = sizes[rule.groups] if rule.groups else 1
    num_rows = sum(sizes[rule.matrix_axes(tensor)[0]] for tensor in rule.tensors)
    expected = (num_rows, *(sizes[axis] for axis in rule.matrix_axes(rule.tensors[0])[1:]))
    have = matrix.global_shape
    if have[1:] != expected[1:] or have[0] < num_rows or (have[0] > num_rows and not rule.padded):
        raise ValueError(
            f"{matrix.part.key} has shape {have}, by config.json it should be {expected}"
        )
    start = 0
    for group in range(num_groups):
        for tensor in rule.tensors:
            block_len = sizes[rule.matrix_axes(tensor)[0]] // num_groups
            yield _Block(start, block_len, tensor, group * block_len)
            start += block_len
    if have[0] > start:
        yield _Block(start, have[0] - start, None, 0)


def _shard(matrix: _Matrix, tensor: HfTensor, hf_first: int, first: int, stop: int) -> Shard:
    strides = contiguous_strides(matrix.shape)
    offset = matrix.part.offset + (first - matrix.start[0]) * strides[0]
    spans = [(hf_first, hf_first + stop - first)]
    spans += [(at, at + size) for at, size in zip(matrix.start[1:], matrix.shape[1:], strict=True)]
    if matrix.rule.stacked:
        expert = matrix.numbers["expert"]
        spans = [(expert, expert + 1), *reversed(spans)]
        strides = (prod(matrix.shape), *reversed(strides))
    start, ends = zip(*spans, strict=True)
    box = Box(tensor.name.format(**matrix.numbers), start, ends)
    return Shard(box, matrix.part.tensor, offset, strides, matrix.part.dtype)
