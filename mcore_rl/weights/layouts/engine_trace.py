"""Runs an engine's own `load_weights` on tracers to find the shards of its parameters.

    tracer of q_proj [8, 4]  --narrow-->  rows 4-7  --copy_-->  parameter qkv_proj[0:4]
    recorded:  Shard(Box("q_proj", (4, 0), (8, 4)), "qkv_proj", offset=0, strides=(4, 1))

Layers that are alike are traced once, and a sample of the others shows that they are. The
parameters keep their values, except that padding is filled.

Fills the padding of layers from that of an example, which is filled already.

layers.3, expert 0   # # # # . .   the loader sets the padding, "."
layers.4, expert 0   # # # # . .   copied from layers.3, for all experts at once
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from mcore_rl.weights.box import Padding, Shard
from mcore_rl.weights.layouts.copy_recorder import CopyRecorder, HfTensors, LoadWeights
from mcore_rl.weights.layouts.layout import LocalTensors
from mcore_rl.weights.layouts.repeated_layers import RepeatedLayers, split_layer
from mcore_rl.weights.plan.coverage import check_coverage

Fill = Callable[[], object]
"""Sets some padding to its constant."""


def list_repeated_fills(
    example_of: Mapping[int, int], padding: Iterable[Padding], tensors: Mapping[str, Tensor]
) -> Iterator[Fill]:
    """Yield what fills the padding of layers that follow an example.

    example_of   layer -> its example
    padding      that of the examples; other padding is ignored
    tensors      name -> contiguous local tensor
    """
    padding_of: dict[int | None, list[Padding]] = defaultdict(list)
    for part in merge_padding(padding):
        padding_of[split_layer(part.tensor).layer].append(part)
    for layer, example in example_of.items():
        for part in padding_of[example]:
            name = split_layer(part.tensor).in_layer(layer)
            target = Padding(name, part.offset, part.shape, part.strides)
            yield partial(target.view(tensors).copy_, part.view(tensors))


def merge_padding(padding: Iterable[Padding]) -> Iterator[Padding]:
    """Yield the same elements in fewer parts: equal parts at equal distances become one."""
    offsets: dict[tuple[str, tuple[int, ...], tuple[int, ...]], set[int]] = defaultdict(set)
    for part in padding:
        offsets[part.tensor, part.shape, part.strides].add(part.offset)
    for (tensor, shape, strides), distinct in offsets.items():
        ordered = sorted(distinct)
        steps = {after - before for before, after in pairwise(ordered)}
        if len(steps) == 1:
            whole = (len(ordered), *shape)
            yield Padding(tensor, ordered[0], whole, (*steps, *strides))
        else:
            yield from (Padding(tensor, offset, shape, strides) for offset in ordered)


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TracedLoad:
    """The effect of a model's `load_weights` on this rank's parameters.

    shards         the elements that it takes from HF tensors, in the order that it does
    fill_padding   sets the others, the padding, to the constants that it gives them
    padded         names of the parameters with padding
    is_sampled     some tensors were not traced, because they are like others
    """

    shards: list[Shard]
    fill_padding: Callable[[], None]
    padded: frozenset[str]
    is_sampled: bool = False


def trace_load_weights(
    load_weights: LoadWeights,
    hf_tensors: HfTensors,
    local_tensors: Mapping[str, Tensor],
    *,
    every: bool = False,
) -> TracedLoad:
    """Return the effect of `load_weights` on `local_tensors`, whose padding is filled.

    hf_tensors      HF name -> (shape, dtype) of every tensor of the checkpoint. The block scales of
                    a matrix that goes into a float8_e4m3fn parameter (weights/hf/fp8.py) are added
                    at the end
    local_tensors   name -> contiguous parameter of this rank. Elements that the loader sets to a
                    constant (`fill_`, `zero_`, a copy of it) are padding: they are filled once
                    tracing has succeeded, and never sent
    every           trace every tensor, also of layers that are alike

    Raises ValueError naming the tensor and the operation that cannot be traced, or the parameter
    element that is not loaded from exactly one place.
    """
    layers = RepeatedLayers(hf_tensors, local_tensors)
    if layers.example_of and not every:
        traced = _trace_examples(load_weights, hf_tensors, local_tensors, layers)
        if traced is not None:
            return traced
    trace = CopyRecorder(LocalTensors(local_tensors))
    trace.run(load_weights, hf_tensors, hf_tensors)
    check_coverage(trace.shards, trace.fills, _count_numels(local_tensors))
    padded = frozenset(padding.tensor for padding in trace.fills)
    return _fill(TracedLoad(trace.shards, partial(_run, list(trace.fills.values())), padded))


def _trace_examples(
    load_weights: LoadWeights,
    hf_tensors: HfTensors,
    local_tensors: Mapping[str, Tensor],
    layers: RepeatedLayers,
) -> TracedLoad | None:
    """Return the effect of `load_weights`, of which some layers are derived from others.

    None if they are not alike after all, or if the loader fails on a part of the tensors: the trace
    of all of them decides then, and names what is wrong.
    """
    trace = CopyRecorder(LocalTensors(local_tensors))
    try:
        trace.run(load_weights, hf_tensors, layers.to_trace(trace.shards))
    except ValueError as error:
        _log.info("every layer is traced: %s", error)
        return None
    shards = layers.complete(trace.shards, trace.given, trace.fills)
    if shards is None:
        _log.info("every layer is traced, because layers of equal parameters are loaded unlike")
        return None
    # A layer is covered as its example is, since their parameters are equal.
    check_coverage(
        [shard for shard in trace.shards if not layers.follows(shard.tensor)],
        [padding for padding in trace.fills if not layers.follows(padding.tensor)],
        {name: n for name, n in _count_numels(local_tensors).items() if not layers.follows(name)},
    )
    fills = [fill for padding, fill in trace.fills.items() if not layers.follows(padding.tensor)]
    fills += list_repeated_fills(layers.example_of, trace.fills, local_tensors)
    padded = frozenset(padding.tensor for padding in trace.fills)
    padded |= {name for name in local_tensors if layers.example_name(name) in padded}
    return _fill(TracedLoad(shards, partial(_run, fills), padded, is_sampled=True))


def record_all(
    load_weights: LoadWeights,
    hf_tensors: HfTensors,
    local_tensors: Mapping[str, Tensor],
    rest: Callable[[], bool],
) -> CopyRecorder:
    """Trace every tensor, and write nothing.

    rest   called between two tensors; returns whether `local_tensors` got new memory in it

    Raises ValueError as CopyRecorder.run does.
    """
    trace = CopyRecorder(LocalTensors(local_tensors), rest)
    trace.run(load_weights, hf_tensors, hf_tensors)
    return trace


def find_unlike(
    sampled: TracedLoad, trace: CopyRecorder, local_tensors: Mapping[str, Tensor]
) -> str | None:
    """Return how a trace of every tensor differs from `sampled`, or None.

    Reads only the sizes of `local_tensors`, so their memory may change meanwhile. Raises ValueError
    naming the parameter element that is not loaded from exactly one place.
    """
    check_coverage(trace.shards, trace.fills, _count_numels(local_tensors))
    wrong = set(sampled.shards) ^ set(trace.shards)
    if not wrong:
        return None
    names = sorted({shard.box.name for shard in wrong})
    whole = _describe_places(names[0], trace.shards)
    derived = _describe_places(names[0], sampled.shards)
    return (
        f"load_weights treats {len(names)} tensors otherwise than a sample of their like told, such"
        f" as {names[0]}: it goes to {whole}, not to {derived}; the weights sent so far are wrong"
        " there. Set sync.trace=full"
    )


def _describe_places(name: str, shards: Iterable[Shard]) -> str:
    """Say where a HF tensor lies in a rank's parameters."""
    own = [f"{s.tensor} at element {s.offset}" for s in shards if s.box.name == name]
    return ", ".join(own[:3]) + (" and more" if len(own) > 3 else "") if own else "nowhere"


def _fill(traced: TracedLoad) -> TracedLoad:
    traced.fill_padding()
    return traced


@torch.no_grad()
def _run(fills: Iterable[Fill]) -> None:
    for fill in fills:
        fill()


def _count_numels(local_tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.numel() for name, tensor in local_tensors.items()}
