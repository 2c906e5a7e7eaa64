"""Runs an engine's own `load_weights` on tracers to find the shards of its parameters.

    tracer of q_proj [8, 4]  --narrow-->  rows 4-7  --copy_-->  parameter qkv_proj[0:4]
    recorded:  Shard(Box("q_proj", (4, 0), (8, 4)), "qkv_proj", offset=0, strides=(4, 1))

A tracer is a tensor without data that knows which part of its HF tensor it stands for. The
parameters keep their values, except that padding is filled.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mcore_rl.slices.box import Shard
from mcore_rl.slices.hf.fp8 import FP8, SCALE_DTYPE, num_blocks, scale_name
from mcore_rl.slices.layouts.local_tensors import LocalTensors
from mcore_rl.slices.layouts.strided import shards_of_view
from mcore_rl.slices.layouts.tracers import Joined, Tracer, is_uniform
from mcore_rl.slices.plan.coverage import Span, check_coverage, runs

aten = torch.ops.aten
JOIN = {aten.cat.default}
"""Operations that lay tracers and padding end to end."""
CAST = {aten._to_copy.default, aten.clone.default}
"""Operations that keep a tracer's place in its HF tensor; they may change its dtype."""
FILL = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
"""Operations that may write a constant to a parameter: padding."""

LOADER_ERRORS = (RuntimeError, TypeError, AttributeError, KeyError, IndexError, AssertionError)
"""Errors that an engine's loader may raise when it gets a tracer instead of a real tensor."""

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], object]


@dataclass(frozen=True)
class TracedLoad:
    """The effect of a model's `load_weights` on this rank's parameters.

    shards         the elements that it takes from HF tensors, in the order that it does
    fill_padding   sets the others, the padding, to the constants that it gives them
    """

    shards: list[Shard]
    fill_padding: Callable[[], None]


def trace_load_weights(
    load_weights: LoadWeights,
    hf_tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    local_tensors: Mapping[str, Tensor],
) -> TracedLoad:
    """Return the effect of `load_weights` on `local_tensors`, whose padding is filled.

    hf_tensors      HF name -> (shape, dtype) of every tensor of the checkpoint. The block scales of
                    a matrix that goes into a float8_e4m3fn parameter (slices/hf/fp8.py) are added
                    at the end
    local_tensors   name -> contiguous parameter of this rank. Elements that the loader sets to a
                    constant (`fill_`, `zero_`, a copy of it) are padding: they are filled once
                    tracing has succeeded, and never sent

    Raises ValueError naming the tensor and the operation that cannot be traced, or the parameter
    element that is not loaded from exactly one place.
    """
    trace = _Recorder(LocalTensors(local_tensors))
    with trace:
        try:
            load_weights(trace.tracers(hf_tensors))
        except LOADER_ERRORS as error:
            raise ValueError(
                f"load_weights failed while tracing {trace.current!r}: {error}"
            ) from error
    trace.local.check_unchanged()
    # SGLang's Qwen3-VL loads a tied embedding twice: also as the output layer, the same parameter.
    shards = list(dict.fromkeys(trace.shards))
    padding = list(dict.fromkeys(trace.padding))
    check_coverage(shards, padding, {n: t.numel() for n, t in local_tensors.items()})
    trace.fill_padding()
    return TracedLoad(shards, trace.fill_padding)


class _Recorder(TorchDispatchMode):
    """Records copies of tracers and constants into parameters; refuses every other write.

    Of several values, a constant is the same value everywhere.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out the wrapper that keeps torch.compile away: loaders are not compiled, and it
        takes as long as everything else that is done for an operation.
        """
        return False

    def __init__(self, local: LocalTensors) -> None:
        super().__init__()
        self.local = local
        self.shards: list[Shard] = []
        self.padding: list[Span] = []
        self._fills: list[Callable[[], object]] = []
        self._quantized: dict[str, tuple[int, ...]] = {}
        """HF name -> shape of the matrices that went into FP8 parameters."""
        self._metas: dict[tuple[int, ...], Tensor] = {}
        """Shape -> the meta tensor of HF tensors of that shape; only views of it are taken."""
        self.current = "(nothing yet)"

    @property
    def device(self) -> torch.device:
        return self.local.device

    def tracers(
        self, hf_tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, tracer) for every tensor, and last for the scales of FP8 matrices.

        Only by then has the loader shown which matrices it copies into FP8 parameters.
        """
        for name, (shape, dtype) in hf_tensors.items():
            yield name, self._tracer(name, tuple(shape), dtype)
        scale_dtype = getattr(torch, SCALE_DTYPE)
        for name, shape in list(self._quantized.items()):
            scales = scale_name(name)
            yield scales, self._tracer(scales, tuple(map(num_blocks, shape)), scale_dtype)

    def _tracer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tracer:
        self.current = name
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
            for target in _written_tensors(func, args, kwargs):
                place = self.local.locate(target)
                if place is not None:
                    if func not in FILL and not self._copies_constant(func, args):
                        raise ValueError(
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
        starts, run_len = runs(target.shape, target.stride(), offset)
        self.padding += [Span(name, int(start), int(start) + run_len) for start in starts]
        self._fills.append(fill)

    @torch.no_grad()
    def fill_padding(self) -> None:
        """Repeat the writes of constants, which were only recorded so far."""
        for fill in self._fills:
            fill()

    def on_tracer(self, tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what `func` gives for a tracer: another tracer for views and casts.

        A copy into a parameter is recorded. Raises ValueError for any other operation.
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
            raise ValueError(
                f"load_weights applies {func} to {tracer.hf_name!r}, which cannot be traced"
            )
        views = func(*map(_meta, args), **{name: _meta(value) for name, value in kwargs.items()})
        if isinstance(views, Tensor):
            return tracer.like(views, tracer.dtype)
        return tree_map(
            lambda x: tracer.like(x, tracer.dtype) if isinstance(x, Tensor) else x, views
        )

    def _join(self, parts: list[Tensor], dim: int = 0) -> Tensor:
        return Joined.make(parts, dim, self) if len(parts) > 1 else parts[0]

    def on_joined(self, joined: Joined, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what `func` gives for joined tracers; a copy or cast is one of each part.

        Raises ValueError for any other operation.
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
        raise ValueError(
            f"load_weights applies {func} to {joined.hf_name!r}, which cannot be traced"
        )

    def _on_copy(self, target: Tensor, source: Tensor) -> None:
        """Record a copy of a tracer, or of padding beside one, into a parameter."""
        label = repr(source.hf_name) if isinstance(source, Tracer) else "padding"
        if target.shape != source.shape:
            raise ValueError(
                f"load_weights copies {label} of shape {tuple(source.shape)} to shape"
                f" {tuple(target.shape)}: broadcasting cannot be traced"
            )
        if target.numel() == 0:
            return
        place = self.local.locate(target)
        if place is None:
            raise ValueError(
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
        self.shards += shards_of_view(
            tracer.hf_name, tracer.hf_shape, tracer.meta, name, offset, target.stride(), dtype
        )


@cache
def _is_mutable(func: Any) -> bool:
    return func._schema.is_mutable


def _meta(value: Any) -> Any:
    """Return a tracer's meta tensor; a view takes its tensor as an argument of its own."""
    return value.meta if isinstance(value, Tracer) else value


def _written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the non-empty tensors that `func` writes to, according to its schema."""
    values = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.numel()]
