"""Says why an engine's own `load_weights` could not be traced, on which device, and where.

The tensors that a traced loader gets in place of weights: they have a shape, but no data.

    Tracer    a view of one HF tensor                             q_proj[4:8]
    Joined    several of them, and padding, laid end to end       gate_proj[:44], zeros [4, 32]

Both hand every operation on them to a recorder (engine_trace.py).
"""

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class LoadRecorder(Protocol):
    """Says what an operation on a tracer gives."""

    @property
    def device(self) -> torch.device:
        """The device that tracers pretend to be on."""
        ...

    def on_tracer(self, tracer: "Tracer", func: Any, args: Any, kwargs: Any) -> Any: ...

    def on_joined(self, joined: "Joined", func: Any, args: Any, kwargs: Any) -> Any: ...


class Tracer(Tensor):
    """A tensor without data that stands for a view of the HF tensor `hf_name`.

    meta      the same view of a uint8 meta tensor of shape `hf_shape`
    is_zero   whether the loader set the HF tensor to 0 before copying it: its values are on other
              ranks
    """

    meta: Tensor
    hf_name: str
    hf_shape: tuple[int, ...]
    recorder: LoadRecorder
    is_zero: bool = False

    @staticmethod
    def make(
        meta: Tensor,
        hf_name: str,
        hf_shape: tuple[int, ...],
        dtype: torch.dtype,
        recorder: LoadRecorder,
    ) -> "Tracer":
        layout = {"strides": meta.stride(), "storage_offset": meta.storage_offset()}
        device = recorder.device
        self = Tensor._make_wrapper_subclass(
            Tracer, meta.shape, **layout, dtype=dtype, device=device
        )
        self.meta = meta
        self.hf_name = hf_name
        self.hf_shape = hf_shape
        self.recorder = recorder
        return self

    def like(self, meta: Tensor, dtype: torch.dtype) -> "Tracer":
        """Return a tracer of another view of the same HF tensor."""
        tracer = Tracer.make(meta, self.hf_name, self.hf_shape, dtype, self.recorder)
        tracer.is_zero = self.is_zero
        return tracer

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = next((x for x in args if isinstance(x, Tracer | Joined)), None)
        if tracer is None:
            leaves = tree_leaves((args, kwargs))
            tracer = next(leaf for leaf in leaves if isinstance(leaf, Tracer | Joined))
        if isinstance(tracer, Joined):
            return tracer.recorder.on_joined(tracer, func, args, kwargs or {})
        return tracer.recorder.on_tracer(tracer, func, args, kwargs or {})


class Joined(Tensor):
    """Tracers and padding laid end to end along `axis`, as torch.cat lays them.

    Padding is a plain tensor with the same value everywhere.
    """

    parts: Sequence[Tensor]
    axis: int
    recorder: LoadRecorder
    __torch_dispatch__ = Tracer.__torch_dispatch__

    @staticmethod
    def make(parts: Sequence[Tensor], dim: int, recorder: LoadRecorder) -> "Joined":
        shape = list(parts[0].shape)
        dim = dim % len(shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        options = {"dtype": parts[0].dtype, "device": parts[0].device}
        self = Tensor._make_wrapper_subclass(Joined, shape, **options)
        self.parts = parts
        self.axis = dim
        self.recorder = recorder
        return self

    @property
    def hf_name(self) -> str:
        return " + ".join(part.hf_name for part in self.parts if isinstance(part, Tracer))

    def cast(self, dtype: torch.dtype) -> "Joined":
        """Return the same parts in another dtype."""
        parts = [
            part.like(part.meta, dtype) if isinstance(part, Tracer) else part.to(dtype)
            for part in self.parts
        ]
        return Joined.make(parts, self.axis, self.recorder)


def is_uniform(tensor: Tensor) -> bool:
    """Return whether a plain tensor has the same value everywhere, as padding has."""
    values = tensor.flatten()
    return bool((values == values[:1]).all())


LOADER_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    KeyError,
    IndexError,
    AssertionError,
)
"""Errors that an engine's loader may raise when it gets a tracer instead of a real tensor."""
_NOT_LOADERS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


class UntraceableError(ValueError):
    """The loader does something that cannot be traced; the message names it and the tensor."""


class LoaderFailedError(ValueError):
    """The loader raised an error of its own; the message holds it, the tensor and the line."""


def describe_loader_error(error: Exception, hf_name: str, device: torch.device) -> str:
    """Return a text for an error that `load_weights` raised over parameters on `device`.

    hf_name   the HF tensor that it was given last
    """
    place = f"parameters on {device}{_find_place_in_loader(error)}"
    if isinstance(error, UntraceableError):
        return f"{error}; {place}"
    kind = type(error).__name__
    return f"load_weights failed while tracing {hf_name!r}: {kind}: {error}; {place}"


def _find_place_in_loader(error: Exception) -> str:
    """Return the innermost line that is neither torch's nor of the recorder, or nothing."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_NOT_LOADERS)
    ]
    if not frames:
        return ""
    return f", in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})"
