"""Says why an engine's own `load_weights` could not be traced, on which device, and where."""

import traceback
from pathlib import Path

import torch

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
    place = f"parameters on {device}{_place_in_loader(error)}"
    if isinstance(error, UntraceableError):
        return f"{error}; {place}"
    kind = type(error).__name__
    return f"load_weights failed while tracing {hf_name!r}: {kind}: {error}; {place}"


def _place_in_loader(error: Exception) -> str:
    """Return the innermost line that is neither torch's nor of the recorder, or nothing."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_NOT_LOADERS)
    ]
    if not frames:
        return ""
    return f", in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})"
