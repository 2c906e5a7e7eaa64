"""Assembles HuggingFace's tensors from Megatron's stored ones, and the other way around.

Which elements correspond is read off the family tables.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from checkpoint_tools.assembly import (
    Assembly,
    Piece,
    Stretch,
    check_pieces,
    find_row,
    make_pieces,
    order_pieces,
)
from checkpoint_tools.foreign_keys import explain_unknown, find_part
from checkpoint_tools.stored import Chunk, StoredTensor
from mcore_rl.weights.box import Shard, contiguous_strides
from mcore_rl.weights.hf.config import (
    find_mtp_problem,
    linear_layers,
    pad_vocab_size,
    with_trained_mtp,
)
from mcore_rl.weights.layouts.training import LocalPart, list_training_padding, make_training_shards
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.mtp import PREFIX
from mcore_rl.weights.models.table import NUMBERED_BY, Family, HfConfig, Rule, Shape, number_key
from mcore_rl.weights.models.value_head import add_value_head

OUTPUT_LAYER = "output_layer.weight"


def choose_config(tensors: Mapping[str, StoredTensor], hf_config: HfConfig) -> HfConfig:
    """Return `hf_config`, with the parts that only some runs of the model have.

    They are a critic's value head, and trained layers for multi-token prediction.
    """
    output = tensors.get(OUTPUT_LAYER)
    is_critic = output is not None and output.shape[0] == 1 and hf_config["vocab_size"] > 1
    if is_critic:
        return add_value_head(hf_config)
    return choose_mtp(hf_config) if has_mtp(tensors) else hf_config


def has_mtp(keys: Iterable[str]) -> bool:
    """Return whether a checkpoint has trained layers for multi-token prediction."""
    return any(key.startswith(PREFIX) for key in keys)


def choose_mtp(hf_config: HfConfig) -> HfConfig:
    """Return `hf_config` with its layers for multi-token prediction, if the table has them."""
    return hf_config if find_mtp_problem(hf_config) else with_trained_mtp(hf_config)


def hf_assemblies(
    tensors: Iterable[StoredTensor],
    hf_config: HfConfig,
    dtype: str | None,
    where: object,
    with_buffers: bool = True,
) -> dict[str, Assembly]:
    """Return how each HF tensor is assembled from the chunks of Megatron's `tensors`, by HF name.

    dtype          of the result, except for tensors whose dtype the family fixes; None: as stored
    with_buffers   whether tensors that no gradient changes must be there; an optimizer has none
    Raises ValueError with `where` and the tensor that is unknown, missing, misshapen or incomplete.
    """
    family = family_of(hf_config)
    num_experts = family.sizes(hf_config)["experts"]
    chunks: list[Chunk] = []
    parts: list[LocalPart] = []
    for tensor in tensors:
        for chunk in tensor.chunks:
            parts.append(find_part(tensor, chunk, num_experts, str(len(chunks))))
            chunks.append(chunk)
    _check_known(parts, family, where)
    try:
        shards = make_training_shards(parts, family, hf_config)
        padding = list_training_padding(parts, family, hf_config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    by_name: dict[str, list[tuple[Shard, Chunk]]] = defaultdict(list)
    for shard in shards:
        by_name[shard.box.name].append((shard, chunks[int(shard.tensor)]))
    skipped: dict[str, list[Stretch]] = defaultdict(list)
    for rows in padding:  # one stretch each: training ranks hold whole rows of the vocabulary
        chunk = chunks[int(rows.tensor)]
        skipped[chunk.key].append(Stretch(chunk, rows.offset, math.prod(rows.shape)))
    fixed = family.dtypes(hf_config, "")
    shapes = {
        name: shape
        for name, shape in family.shapes(hf_config).items()
        if with_buffers or not fixed[name]
    }
    _check_names(by_name.keys(), shapes.keys(), where)
    assemblies: dict[str, Assembly] = {}
    for name, shape in shapes.items():
        to = (fixed[name] or dtype) if dtype else ""
        assemblies[name] = _assemble(name, shape, to, by_name[name], skipped, where)
    return assemblies


def _check_known(parts: Sequence[LocalPart], family: Family, where: object) -> None:
    for part in parts:
        try:
            family.find(part.key)
        except ValueError as error:
            raise ValueError(f"{where}: {error}: {explain_unknown(part.key)}") from error


def _check_names(actual: Collection[str], wanted: Collection[str], where: object) -> None:
    missing = sorted(set(wanted) - set(actual))
    surplus = sorted(set(actual) - set(wanted))
    if missing:
        raise ValueError(
            f"{where} lacks {len(missing)} of {len(wanted)} tensors, the first is {missing[0]!r}"
        )
    if surplus:
        raise ValueError(f"{where} has {surplus[0]!r}, which the model of config.json lacks")


def _assemble(
    name: str,
    shape: Shape,
    dtype: str,
    members: Sequence[tuple[Shard, Chunk]],
    skipped: dict[str, list[Stretch]],
    where: object,
) -> Assembly:
    """Return the assembly of one HF tensor; as stored if `dtype` is "".

    Padding in `skipped` moves to the first tensor made of the same key, so that chunks are read
    whole.
    """
    strides = contiguous_strides(shape)
    pieces: list[Piece] = []
    passed_over: list[Stretch] = []
    for shard, chunk in members:
        target = sum(at * stride for at, stride in zip(shard.box.start, strides, strict=True))
        source = (shard.offset, shard.strides)
        pieces += make_pieces(chunk, shard.box.shape, source, (target, strides), find_row(shape))
        passed_over += skipped.pop(chunk.key, [])
    boxes = [(shard.box.start, shard.box.shape) for shard, _ in members]
    return check_pieces(
        name, dtype or members[0][1].dtype, shape, boxes, pieces, passed_over, where
    )


@dataclass(frozen=True)
class Wanted:
    """A tensor of Megatron's model that is to be written, and the boxes (offset, shape) to store
    it in.

    is_buffer   no gradient changes it, so that the optimizer has no state of it
    """

    key: str
    dtype: str
    shape: Shape
    boxes: tuple[tuple[Shape, Shape], ...]
    is_buffer: bool = False


def megatron_tensors(hf_config: HfConfig, dtype: str) -> list[Wanted]:
    """Return the tensors that megatron-core's model of this config saves, with a box per layer and
    expert.

    dtype   of tensors whose dtype the family's table does not fix
    """
    family = family_of(hf_config)
    sizes = family.sizes(hf_config)
    left_out = family.find_left_out(hf_config)
    wanted: list[Wanted] = []
    for rule in family.rules:
        if not any(
            tensor.name not in left_out and all(sizes[axis] for axis in tensor.axes)
            for tensor in rule.tensors
        ):
            continue
        rows = pad_vocab_size(hf_config, 1) if rule.padded else rule.count_rows(sizes)
        matrix = (rows, *(sizes[axis] for axis in rule.matrix_axes(rule.tensors[0])[1:]))
        fixed = rule.tensors[0].dtype
        for key, num_layers in _keys(rule, hf_config):
            stacked: Shape = (num_layers,) if num_layers else ()
            if rule.has_expert_axis:
                stacked = (*stacked, sizes["experts"])
            boxes = _matrix_boxes(stacked, matrix)
            shape = (*stacked, *matrix)
            wanted.append(Wanted(key, fixed or dtype, shape, boxes, is_buffer=fixed is not None))
    return wanted


def _matrix_boxes(stacked: Shape, matrix: Shape) -> tuple[tuple[Shape, Shape], ...]:
    """Return (offset, shape) of every matrix of a tensor that stacks them on the axes `stacked`."""
    boxes: list[tuple[Shape, Shape]] = []
    for position in product(*(range(size) for size in stacked)):
        offset = (*position, *(0 for _ in matrix))
        shape = (*(1 for _ in position), *matrix)
        boxes.append((offset, shape))
    return tuple(boxes)


def layer_keys_are_numbered(hf_config: HfConfig) -> bool:
    """Return True if layers are not all of a kind: megatron-core then writes a key per layer."""
    family = family_of(hf_config)
    kinds = {family.list_kinds(hf_config, k) for k in range(hf_config["num_hidden_layers"])}
    return len(kinds) > 1 or any(linear_layers(hf_config))


def _keys(rule: Rule, hf_config: HfConfig) -> list[tuple[str, int]]:
    """Return (key, number of layers on its first axis, or 0) of each tensor of a rule."""
    if rule.where == "model":
        return [(rule.key, 0)]
    if rule.where in NUMBERED_BY:
        numbers = range(family_of(hf_config).sizes(hf_config)[NUMBERED_BY[rule.where]])
        return [(number_key(rule.key, number), 0) for number in numbers]
    family = family_of(hf_config)
    num_layers = hf_config["num_hidden_layers"]
    layers = [layer for layer in range(num_layers) if family.has_rule(rule, hf_config, layer)]
    if not layer_keys_are_numbered(hf_config):
        return [(rule.key, num_layers)] if layers else []
    return [(rule.key.replace(".layers.", f".layers.{layer}.", 1), 0) for layer in layers]


def megatron_assemblies(
    wanted: Sequence[Wanted], hf: Mapping[str, Chunk], hf_config: HfConfig, where: object
) -> list[tuple[Wanted, Shape, Assembly]]:
    """Return (tensor, offset, assembly from HF tensors) for each box of `wanted`; padding is 0.

    hf   HF name -> the chunk that holds the tensor
    Raises ValueError with `where` and the HF tensor that is missing or misshapen.
    """
    family = family_of(hf_config)
    shapes = family.shapes(hf_config)
    boxes = [(tensor, offset, shape) for tensor in wanted for offset, shape in tensor.boxes]
    parts = [
        LocalPart(tensor.key, tensor.shape, offset, shape, str(number), tensor.dtype)
        for number, (tensor, offset, shape) in enumerate(boxes)
    ]
    pieces: dict[int, list[Piece]] = defaultdict(list)
    for shard in make_training_shards(parts, family, hf_config):
        name = shard.box.name
        number = int(shard.tensor)
        chunk = hf.get(name)
        if chunk is None or chunk.shape != shapes[name]:
            problem = (
                f"lacks {name!r}" if chunk is None else f"has {chunk.key!r} of shape {chunk.shape}"
            )
            raise ValueError(
                f"{where} {problem}, by config.json it should have shape {shapes[name]}"
            )
        shape = boxes[number][2]
        strides = contiguous_strides(chunk.shape)
        source = sum(at * stride for at, stride in zip(shard.box.start, strides, strict=True))
        pieces[number] += make_pieces(
            chunk, shard.box.shape, (source, strides), (shard.offset, shard.strides), shape[-1]
        )
    return [
        (tensor, offset, Assembly(tensor.key, tensor.dtype, shape, order_pieces(pieces[number])))
        for number, (tensor, offset, shape) in enumerate(boxes)
    ]


def extra_state_keys(hf_config: HfConfig) -> list[str]:
    """Return the keys of the states of Transformer Engine's modules, which a load asks for.

    They are empty except in 8-bit training.
    """
    family = family_of(hf_config)
    of_module = r"\.(linear_\w+|out_proj|fc[12]_latent_proj)\.weight$"
    modules = [rule for rule in family.rules if re.search(of_module, rule.key)]
    # Neither has a tensor of its own under its name: attention has none, in_proj one for each part.
    attention = "decoder.layers.self_attention."
    sizes = family.sizes(hf_config)
    linear = "decoder.layers.mixer." if "mamba_in" in sizes else attention
    modules.append(Rule(f"{attention}core_attention.weight", (), "softmax"))
    modules.append(Rule(f"{linear}in_proj.weight", (), "linear"))
    num_experts = sizes["experts"]
    keys: list[str] = []
    for rule in modules:
        for key, num_layers in _keys(rule, hf_config):
            stacked = [num_layers] if num_layers else []
            if rule.tensors and rule.has_expert_axis and num_experts:
                stacked.append(num_experts)
            shape = ".".join(map(str, stacked)) or "1"
            for position in product(*map(range, stacked)):
                place = ".".join(map(str, position)) or "0"
                keys.append(f"{key.removesuffix('weight')}_extra_state/shard_{place}_{shape}")
    return keys
