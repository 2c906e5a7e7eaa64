"""Records what a loader that is fed with tracers copies into the parameters of an engine rank.

A tracer is a tensor without data that knows which part of its HF tensor it stands for. Nothing is
written while a loader is traced. A copy of a strided view gives a shard for each box of the view:

    HF tensor [4, 2]      view: every second row      local tensor [2, 2]
    row 0  a b            a b                         a b  <- Shard(box of row 0, offset=0)
    row 1  c d            e f               --copy->  e f  <- Shard(box of row 2, offset=2)
    row 2  e f
    row 3  g h
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mcore_rl.weights.box import Box, Padding, Shard, contiguous_strides, unravel
from mcore_rl.weights.hf.fp8 import FP8, SCALE_DTYPE, count_blocks, make_scale_name
from mcore_rl.weights.layouts.layout import LocalTensors
from mcore_rl.weights.layouts.loader import (
    LOADER_ERRORS,
    Joined,
    LoaderFailedError,
    Tracer,
    UntraceableError,
    describe_loader_error,
    is_uniform,
)

aten = torch.ops.aten
JOIN = {aten.cat.default}
"""Operations that lay tracers and padding end to end."""
CAST = {aten._to_copy.default, aten.clone.default}
"""Operations that keep a tracer's place in its HF tensor; they may change its dtype."""
FILL = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
"""Operations that may write a constant to a parameter: padding."""
LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], object]
HfTensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""HF name -> (shape, dtype)"""


class CopyRecorder(TorchDispatchMode):
    """Records copies of tracers and constants into parameters; refuses every other write.

    Of several values, a constant is the same value everywhere.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out the wrapper that keeps torch.compile away: loaders are not compiled, and it
        takes as long as everything else that is done for an operation.
        """
        return False

    def __init__(self, local: LocalTensors, rest: Callable[[], bool] | None = None) -> None:
        """`rest` is called between tensors; it returns whether parameters got new memory in it."""
        super().__init__()
        self._rest = rest
        self.local = local
        self.shards: list[Shard] = []
        self.fills: dict[Padding, Callable[[], object]] = {}
        """Padding -> the operation that sets it to a constant, which was only recorded so far."""
        self._quantized: dict[str, tuple[int, ...]] = {}
        """HF name -> shape of the matrices that went into FP8 parameters."""
        self._metas: dict[tuple[int, ...], Tensor] = {}
        """Shape -> the meta tensor of HF tensors of that shape; only views of it are taken."""
        self.given: list[str] = []
        """HF names of the tensors and scales that the loader was given."""

    @property
    def _current(self) -> str:
        return self.given[-1] if self.given else "(nothing yet)"

    @property
    def device(self) -> torch.device:
        return self.local.device

    def run(self, load_weights: LoadWeights, hf_tensors: HfTensors, names: Iterable[str]) -> None:
        """Run `load_weights` on tracers of the tensors `names` of `hf_tensors`.

        Raises UntraceableError for an operation that cannot be traced, and LoaderFailedError for
        the loader's own error. Both are ValueErrors that name the tensor, the device of the
        parameters and the line of the loader.
        """
        with self:
            try:
                load_weights(self._tracers(hf_tensors, names))
            except LOADER_ERRORS as error:
                text = describe_loader_error(error, self._current, self.device)
                is_ours = isinstance(error, UntraceableError)
                raise (UntraceableError if is_ours else LoaderFailedError)(text) from error
        self.local.check_unchanged()
        # SGLang's Qwen3-VL loads a tied embedding twice: also as the output layer.
        self.shards = list(dict.fromkeys(self.shards))

    def _tracers(self, hf_tensors: HfTensors, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, tracer) for every name, and last for the scales of FP8 matrices.

        Only by then has the loader shown which matrices it copies into FP8 parameters.
        """
        for name in names:
            shape, dtype = hf_tensors[name]
            yield name, self._tracer(name, tuple(shape), dtype)
        scale_dtype = getattr(torch, SCALE_DTYPE)
        for name, shape in list(self._quantized.items()):
            scales = make_scale_name(name)
            yield scales, self._tracer(scales, tuple(map(count_blocks, shape)), scale_dtype)

    def _tracer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tracer:
        if self._rest is not None and self.given and self._rest():
            self.local.refresh()
        self.given.append(name)
        meta = self._metas.get(shape)
        if meta is None:
            meta = torch.empty(shape, dtype=torch.uint8, device="meta")
            self._metas[shape] = meta
        return Tracer.make(meta, name, shape, dtype, self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in args:
            if type(value) is Tracer:
                return self.on_tracer(value, func, args, kwargs)
        if _is_mutable(func) and not any(
            isinstance(x, Tracer | Joined) for x in tree_leaves((args, kwargs))
        ):
            for target in _list_written_tensors(func, args, kwargs):
                place = self.local.locate(target)
                if place is not None:
                    if func not in FILL and not self._copies_constant(func, args):
                        raise UntraceableError(
                            f"load_weights writes to parameter {place[0]!r} by {func}, which cannot"
                            " be traced"
                        )
                    self._on_constant(target, *place, partial(func, *args, **kwargs))
                    return target
        return func(*args, **kwargs)

    def _copies_constant(self, func: Any, args: Any) -> bool:
        """Return whether an operation copies one value everywhere, but not from a parameter."""
        return (
            func is aten.copy_.default
            and self.local.locate(args[1]) is None
            and is_uniform(args[1])
        )

    def _on_constant(
        self, target: Tensor, name: str, offset: int, fill: Callable[[], object]
    ) -> None:
        """Record as padding what `fill` writes to `target`, a view of a parameter."""
        padding = Padding(name, offset, tuple(target.shape), target.stride())
        self.fills[padding] = fill

    def on_tracer(self, tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what `func` gives for a tracer: another tracer for views and casts.

        A copy into a parameter is recorded. Raises UntraceableError for any other operation.
        """
        if func is aten.copy_.default and not isinstance(args[0], Tracer):
            self._on_copy(args[0], tracer)
            return args[0]
        if func in CAST:
            return tracer.like(tracer.meta, kwargs.get("dtype") or tracer.dtype)
        if func is aten.zero_.default and tracer.meta.numel() == math.prod(tracer.hf_shape):
            tracer.is_zero = True
            return tracer
        if func in JOIN and all(isinstance(part, Tracer) or is_uniform(part) for part in args[0]):
            return self._join(*args, **kwargs)
        if not func.is_view or func is aten.view.dtype:
            raise UntraceableError(
                f"load_weights applies {func} to {tracer.hf_name!r}, which cannot be traced"
            )
        views = func(
            *map(_make_meta, args), **{name: _make_meta(value) for name, value in kwargs.items()}
        )
        if isinstance(views, Tensor):
            return tracer.like(views, tracer.dtype)
        return tree_map(
            lambda x: tracer.like(x, tracer.dtype) if isinstance(x, Tensor) else x, views
        )

    def _join(self, parts: list[Tensor], dim: int = 0) -> Tensor:
        return Joined.make(parts, dim, self) if len(parts) > 1 else parts[0]

    def on_joined(self, joined: Joined, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what `func` gives for joined tracers; a copy or cast is one of each part.

        Raises UntraceableError for any other operation.
        """
        if (
            func is aten.copy_.default
            and not isinstance(args[0], Joined)
            and args[0].shape == joined.shape
        ):
            targets = args[0].split([part.shape[joined.axis] for part in joined.parts], joined.axis)
            for target, part in zip(targets, joined.parts, strict=True):
                self._on_copy(target, part)
            return args[0]
        if func in CAST:
            return joined.cast(kwargs.get("dtype") or joined.dtype)
        raise UntraceableError(
            f"load_weights applies {func} to {joined.hf_name!r}, which cannot be traced"
        )

    def _on_copy(self, target: Tensor, source: Tensor) -> None:
        """Record a copy of a tracer, or of padding beside one, into a parameter."""
        label = repr(source.hf_name) if isinstance(source, Tracer) else "padding"
        if target.shape != source.shape:
            raise UntraceableError(
                f"load_weights copies {label} of shape {tuple(source.shape)} to shape"
                f" {tuple(target.shape)}: broadcasting cannot be traced"
            )
        if target.numel() == 0:
            return
        place = self.local.locate(target)
        if place is None:
            raise UntraceableError(
                f"load_weights copies {label} to a tensor of shape {tuple(target.shape)}"
                " that is no parameter, which cannot be traced"
            )
        if not isinstance(source, Tracer):
            self._on_constant(target, *place, partial(target.copy_, source))
        elif source.is_zero:
            self._on_constant(target, *place, target.zero_)
        else:
            self._on_weight(target, *place, source)

    def _on_weight(self, target: Tensor, name: str, offset: int, tracer: Tracer) -> None:
        dtype = str(target.dtype).removeprefix("torch.")
        if dtype == FP8:
            self._quantized[tracer.hf_name] = tracer.hf_shape
        self.shards += cut_view(
            tracer.hf_name, tracer.hf_shape, tracer.meta, name, offset, target.stride(), dtype
        )


@dataclass(frozen=True)
class _Dim:
    """A dimension of the copy: `size` steps of `source` elements in the HF tensor.

    Each is a step of `target` elements in the local tensor.
    """

    size: int
    source: int
    target: int


@dataclass(frozen=True)
class _Part:
    """The box [start, stop) of the HF tensor, and where it lies from the local memory's begin."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


@cache
def _is_mutable(func: Any) -> bool:
    return func._schema.is_mutable


def _make_meta(value: Any) -> Any:
    """Return a tracer's meta tensor; a view takes its tensor as an argument of its own."""
    return value.meta if isinstance(value, Tracer) else value


def _list_written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the non-empty tensors that `func` writes to, according to its schema."""
    values = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.numel()]


def cut_view(
    name: str,
    hf_shape: Sequence[int],
    view: Tensor,
    tensor: str,
    offset: int,
    strides: Sequence[int],
    dtype: str,
) -> list[Shard]:
    """Return the shards that result from copying `view` to local memory.

    view                       a view of a contiguous tensor of shape `hf_shape`
    tensor, offset, strides    the local memory, which has the shape of `view`, in elements

    A view that is not a box (rows taken in steps, heads interleaved) gives several shards. Raises
    ValueError if an axis of the view wraps around the edge of the HF tensor.
    """
    if view.numel() == 0:
        return []
    first = int(view.storage_offset())
    try:
        parts = _list_parts(
            tuple(hf_shape), tuple(view.shape), view.stride(), first, tuple(strides)
        )
    except ValueError as error:
        raise ValueError(f"a view of HF tensor {name!r} {error}: cannot be traced") from error
    return [
        Shard(Box(name, part.start, part.stop), tensor, offset + part.offset, part.strides, dtype)
        for part in parts
    ]


@lru_cache(maxsize=4096)
def _list_parts(
    hf_shape: tuple[int, ...],
    shape: tuple[int, ...],
    source_strides: tuple[int, ...],
    first: int,
    target_strides: tuple[int, ...],
) -> tuple[_Part, ...]:
    """Return the boxes of a view that begins at element `first` of the HF tensor.

    The tensors of all experts are cut alike, so most calls find their answer. Raises ValueError
    with what the view does if it is not made of boxes.
    """
    dims = []
    for size, source, target in zip(shape, source_strides, target_strides, strict=True):
        if size > 1:
            dims.append(_Dim(size, source, target))
    hf_strides = contiguous_strides(hf_shape)
    parts = []
    for source, target, box_dims in _list_boxes(_merge(dims), hf_strides):
        start = unravel(first + source, hf_shape)
        extents, local = _find_extents(hf_shape, hf_strides, start, box_dims)
        stop = tuple(a + n for a, n in zip(start, extents, strict=True))
        parts.append(_Part(start, stop, target, local))
    return tuple(parts)


def _merge(dims: list[_Dim]) -> list[_Dim]:
    """Return the dimensions outermost first, adjacent ones merged where both memories allow it."""
    merged: list[_Dim] = []
    for dim in sorted(dims, key=lambda dim: -dim.source):
        outer = merged[-1] if merged else None
        if (
            outer
            and outer.source == dim.size * dim.source
            and outer.target == dim.size * dim.target
        ):
            merged[-1] = _Dim(outer.size * dim.size, dim.source, dim.target)
        else:
            merged.append(dim)
    return merged


def _list_boxes(
    dims: list[_Dim], hf_strides: Sequence[int]
) -> Iterator[tuple[int, int, list[_Dim]]]:
    """Split the copy into boxes by stepping along dimensions that are no axis of the HF tensor.

    Yields (offset in the HF tensor, offset in local memory, dimensions of the box) for each box.
    """
    box_dims: list[_Dim] = []
    stepped: list[_Dim] = []
    taken: set[int] = set()
    for dim in reversed(dims):
        is_axis = dim.source in hf_strides and dim.source not in taken
        (box_dims if is_axis else stepped).append(dim)
        taken.add(dim.source)
    for steps in product(*(range(dim.size) for dim in reversed(stepped))):
        source = 0
        target = 0
        for n, dim in zip(steps, reversed(stepped), strict=True):
            source += n * dim.source
            target += n * dim.target
        yield source, target, box_dims


def _find_extents(
    hf_shape: Sequence[int],
    hf_strides: Sequence[int],
    start: Sequence[int],
    dims: list[_Dim],
) -> tuple[list[int], tuple[int, ...]]:
    """Return the box's extent and its local stride on each HF axis.

    A dimension that is longer than an axis continues on the next outer axis.
    """
    extents = [1] * len(hf_shape)
    local = list(contiguous_strides(hf_shape))
    for dim in dims:
        axis = max(
            a for a, stride in enumerate(hf_strides) if stride == dim.source and hf_shape[a] > 1
        )
        size = dim.size
        target = dim.target
        while size > hf_shape[axis] - start[axis]:
            if start[axis] != 0 or size % hf_shape[axis] or axis == 0 or extents[axis] != 1:
                raise ValueError(f"wraps around axis {axis}")
            extents[axis], local[axis] = hf_shape[axis], target
            size //= hf_shape[axis]
            target *= hf_shape[axis]
            axis -= 1
        if extents[axis] != 1:
            raise ValueError(f"crosses axis {axis} twice")
        extents[axis], local[axis] = size, target
    return extents, tuple(local)
