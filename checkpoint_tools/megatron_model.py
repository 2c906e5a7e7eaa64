"""Megatron's model in the coordinates of HuggingFace tensors and the other way, by the family tables."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from checkpoint_tools.assembly import (
    Assembly,
    Piece,
    Stretch,
    checked,
    make_pieces,
    ordered,
    row_of,
)
from checkpoint_tools.stored import Chunk, StoredTensor
from mcore_rl.slices.box import Shard
from mcore_rl.slices.families import family_of
from mcore_rl.slices.families.table import HfConfig, Rule, Shape
from mcore_rl.slices.families.value_head import with_value_head
from mcore_rl.slices.hf.config import moe_layers, padded_vocab_size
from mcore_rl.slices.layouts.training import LocalPart, training_padding, training_shards
from mcore_rl.slices.plan.coverage import contiguous_strides

OUTPUT_LAYER = "output_layer.weight"


def config_of(tensors: Mapping[str, StoredTensor], hf_config: HfConfig) -> HfConfig:
    """`hf_config`, with a value head if that is what the checkpoint has: a critic's."""
    output = tensors.get(OUTPUT_LAYER)
    is_critic = output is not None and output.shape[0] == 1 and hf_config["vocab_size"] > 1
    return with_value_head(hf_config) if is_critic else hf_config


def hf_assemblies(
    tensors: Iterable[StoredTensor],
    hf_config: HfConfig,
    dtype: str | None,
    where: object,
    with_buffers: bool = True,
) -> dict[str, Assembly]:
    """HF name -> how the tensor is made of the chunks of Megatron's `tensors`.

    dtype          of the result, but for tensors whose dtype the family's table gives; by default as stored
    with_buffers   whether what no gradient changes must be there too (an optimizer has no state of it)
    ValueError names `where` and the tensor if one is unknown, missing, misshapen or not whole.
    """
    family = family_of(hf_config)
    chunks = dict(enumerate((t, c) for t in tensors for c in t.chunks))
    parts = [
        LocalPart(tensor.key, tensor.shape, chunk.offset, chunk.shape, str(number), chunk.dtype)
        for number, (tensor, chunk) in chunks.items()
    ]
    try:
        shards = training_shards(parts, family, hf_config)
        padding = training_padding(parts, family, hf_config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    by_name: dict[str, list[tuple[Shard, Chunk]]] = defaultdict(list)
    for shard in shards:
        by_name[shard.box.name].append((shard, chunks[int(shard.tensor)][1]))
    skipped: dict[str, list[Stretch]] = defaultdict(list)
    for span in padding:
        chunk = chunks[int(span.tensor)][1]
        skipped[chunk.key].append(Stretch(chunk, span.start, span.stop - span.start))
    fixed = family.dtypes(hf_config, "")
    shapes = {
        n: shape for n, shape in family.shapes(hf_config).items() if with_buffers or not fixed[n]
    }
    _check_names(by_name.keys(), shapes.keys(), where)
    return {
        name: _assembly(
            name, shape, (fixed[name] or dtype) if dtype else "", by_name[name], skipped, where
        )
        for name, shape in shapes.items()
    }


def _check_names(have: Collection[str], wanted: Collection[str], where: object) -> None:
    missing, surplus = sorted(set(wanted) - set(have)), sorted(set(have) - set(wanted))
    if missing:
        raise ValueError(
            f"{where} lacks {len(missing)} of {len(wanted)} tensors, the first is {missing[0]!r}"
        )
    if surplus:
        raise ValueError(f"{where} has {surplus[0]!r}, which the model of config.json has not")


def _assembly(
    name: str,
    shape: Shape,
    dtype: str,
    members: Sequence[tuple[Shard, Chunk]],
    skipped: dict[str, list[Stretch]],
    where: object,
) -> Assembly:
    """Padding goes with the only tensor of its key, so that chunks are read whole."""
    strides = contiguous_strides(shape)
    pieces: list[Piece] = []
    passed_over: list[Stretch] = []
    for shard, chunk in members:
        target = sum(at * stride for at, stride in zip(shard.box.start, strides, strict=True))
        source = (shard.offset, shard.strides)
        pieces += make_pieces(chunk, shard.box.shape, source, (target, strides), row_of(shape))
        passed_over += skipped.pop(chunk.key, [])
    boxes = [(shard.box.start, shard.box.shape) for shard, _ in members]
    return checked(name, dtype or members[0][1].dtype, shape, boxes, pieces, passed_over, where)


@dataclass(frozen=True)
class Wanted:
    """A tensor of Megatron's model, and the boxes (offset, shape) it is to be stored in.

    is_buffer   no gradient changes it, the optimizer has no state of it
    """

    key: str
    dtype: str
    shape: Shape
    boxes: tuple[tuple[Shape, Shape], ...]
    is_buffer: bool = False


def megatron_tensors(hf_config: HfConfig, dtype: str) -> list[Wanted]:
    """What megatron-core's model of this config saves: a box per layer and expert."""
    family = family_of(hf_config)
    sizes, left_out = family.sizes(hf_config), family.left_out(hf_config)
    wanted = []
    for rule in family.rules:
        if not any(
            t.name not in left_out and all(sizes[axis] for axis in t.axes) for t in rule.tensors
        ):
            continue
        rows = sum(sizes[rule.matrix_axes(tensor)[0]] for tensor in rule.tensors)
        if rule.padded:
            rows = padded_vocab_size(hf_config, 1)
        matrix = (rows, *(sizes[axis] for axis in rule.matrix_axes(rule.tensors[0])[1:]))
        lead = (sizes["experts"],) if rule.has_expert_axis else ()
        for key, layers in _keys(rule, hf_config):
            whole = (*((layers,) if layers else ()), *lead, *matrix)
            axes = len(whole) - len(matrix)
            boxes = tuple(
                ((*at, *(0 for _ in matrix)), (*(1 for _ in at), *matrix))
                for at in product(*(range(size) for size in whole[:axes]))
            )
            fixed = rule.tensors[0].dtype
            wanted.append(Wanted(key, fixed or dtype, whole, boxes, is_buffer=fixed is not None))
    return wanted


def layer_keys_are_numbered(hf_config: HfConfig) -> bool:
    """Whether the layers differ (dense and with experts): then megatron-core writes a key for each."""
    moe = moe_layers(hf_config)
    return any(moe) and not all(moe)


def _keys(rule: Rule, hf_config: HfConfig) -> list[tuple[str, int]]:
    """(key, layers on its first axis or 0) of each tensor of the rule."""
    if rule.where == "model":
        return [(rule.key, 0)]
    moe = moe_layers(hf_config)
    layers = [
        i
        for i, has in enumerate(moe)
        if rule.where == "layer" or bool(has) == (rule.where == "moe")
    ]
    if not layer_keys_are_numbered(hf_config):
        return [(rule.key, len(moe))] if layers else []
    return [(rule.key.replace(".layers.", f".layers.{layer}.", 1), 0) for layer in layers]


def megatron_assemblies(
    wanted: Sequence[Wanted], hf: Mapping[str, Chunk], hf_config: HfConfig, where: object
) -> list[tuple[Wanted, Shape, Assembly]]:
    """(tensor, offset, how the box there is made of HF tensors) for each box; padding is 0.

    ValueError names `where` and the HF tensor that is missing or misshapen.
    """
    shapes = family_of(hf_config).shapes(hf_config)
    family = family_of(hf_config)
    boxes = [(tensor, offset, shape) for tensor in wanted for offset, shape in tensor.boxes]
    parts = [
        LocalPart(tensor.key, tensor.shape, offset, shape, str(number), tensor.dtype)
        for number, (tensor, offset, shape) in enumerate(boxes)
    ]
    pieces: dict[int, list[Piece]] = defaultdict(list)
    for shard in training_shards(parts, family, hf_config):
        name, number = shard.box.name, int(shard.tensor)
        if name not in hf or hf[name].shape != shapes[name]:
            found = (
                f"has {hf[name].key!r} of shape {hf[name].shape}"
                if name in hf
                else f"lacks {name!r}"
            )
            raise ValueError(f"{where} {found}, by config.json it should have shape {shapes[name]}")
        chunk = hf[name]
        strides, shape = contiguous_strides(chunk.shape), boxes[number][2]
        source = sum(at * stride for at, stride in zip(shard.box.start, strides, strict=True))
        pieces[number] += make_pieces(
            chunk, shard.box.shape, (source, strides), (shard.offset, shard.strides), shape[-1]
        )
    return [
        (tensor, offset, Assembly(tensor.key, tensor.dtype, shape, ordered(pieces[number])))
        for number, (tensor, offset, shape) in enumerate(boxes)
    ]


def extra_state_keys(hf_config: HfConfig) -> list[str]:
    """Keys of the states of Transformer Engine's modules, which hold nothing but in 8-bit training, and which
    a load asks for.
    """
    family = family_of(hf_config)
    attention = Rule("decoder.layers.self_attention.core_attention.weight", ())
    linear = [rule for rule in family.rules if re.search(r"\.linear_\w+\.weight$", rule.key)]
    keys = []
    for rule in (attention, *linear):
        experts = (
            range(family.sizes(hf_config)["experts"])
            if rule.tensors and rule.has_expert_axis
            else ()
        )
        for key, num_layers in _keys(rule, hf_config):
            axes = [range(num_layers)] if num_layers else []
            axes += [experts] if experts else []
            shape = ".".join(str(len(axis)) for axis in axes) or "1"
            for at in product(*axes):
                place = ".".join(map(str, at)) or "0"
                keys.append(f"{key.removesuffix('weight')}_extra_state/shard_{place}_{shape}")
    return keys
