"""Holds a second set of a rank's parameters: filled while the engine decodes, then swapped in."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from mcore_rl.device import synchronize
from mcore_rl.weight_sync.transports.host.segment import Segment, allocate_like
from mcore_rl.weight_sync.transports.transport import TransferError


class Staging:
    """Holds the next version in `tensors`; takes as much memory as the parameters themselves.

    On the host both sets lie in memory that other processes can map, so parameters move there.
    """

    def __init__(self, parameters: Mapping[str, Tensor], live: Segment | None = None) -> None:
        """Allocate the second set. It gets the parameters' values, as no version brings padding.

        On the host a thread fills it; `finish` is to be called before it is used.
        `live`: the segment of an earlier Staging in which the parameters lie now.
        """
        self.segments: tuple[Segment, Segment] | None = None
        """The memory of both sets, if that is on the host. The second one is new."""
        self._filling: Future[None] | None = None
        with torch.inference_mode(False):
            if all(parameter.is_cpu for parameter in parameters.values()):
                live = live or _move_to_segment(parameters)
                values = {name: parameter.detach() for name, parameter in parameters.items()}
                staged, offsets = allocate_like(values)
                self._filling = _in_a_thread(staged.write, values, offsets)
                self.tensors = _tensors_of(staged, values, offsets)
                self.segments = live, staged
            else:
                self.tensors = {
                    name: torch.empty_like(parameter).copy_(parameter.detach())
                    for name, parameter in parameters.items()
                }
        self.version: int | None = None
        """The version that `tensors` holds completely, or None."""

    def finish(self, parameters: Mapping[str, Tensor], changed: Iterable[str] = ()) -> None:
        """Return once the second set has the values of the parameters, also of those `changed`
        since.

        Raises OSError if there is no memory for it.
        """
        if self._filling is not None:
            self._filling.result()
        for name in changed:
            self.tensors[name].copy_(parameters[name].detach())

    def live_segment(self, parameters: Mapping[str, Tensor]) -> Segment | None:
        """Return the segment in which all parameters with memory of their own lie, if one does."""
        own = [parameter for parameter in parameters.values() if _owns_memory(parameter)]
        for segment in self.segments or ():
            if all(map(segment.holds, own)):
                return segment
        return None

    def swap(self, version: int, parameters: Mapping[str, Tensor]) -> None:
        """Give all parameters the staged values of `version`.

        On the host, pointers are exchanged. On a device values are copied, because captured graphs
        refer to the parameters' addresses; so are parameters that share their memory with others.

        Raises TransferError, and changes nothing, if `version` is not the staged version.
        """
        if self.version != version:
            raise TransferError(
                f"version {version} is to be swapped in, but {self.version} is staged"
            )
        self.version = None
        for name, parameter in parameters.items():
            staged = self.tensors[name]
            if parameter.is_cpu and _owns_memory(parameter):
                self.tensors[name] = parameter.data
                parameter.data = staged
            else:
                parameter.data.copy_(staged)
        synchronize()


def _move_to_segment(parameters: Mapping[str, Tensor]) -> Segment:
    """Move the parameters with memory of their own to a segment, and return it."""
    own = {name: p.detach() for name, p in parameters.items() if _owns_memory(p)}
    segment, offsets = allocate_like(own)
    segment.write(own, offsets)
    for name, moved in _tensors_of(segment, own, offsets).items():
        parameters[name].data = moved
    return segment


def _tensors_of(
    segment: Segment, like: Mapping[str, Tensor], offsets: Mapping[str, int]
) -> dict[str, Tensor]:
    return {name: segment.tensor_like(tensor, offsets[name]) for name, tensor in like.items()}


def _in_a_thread(function: Callable[..., None], *arguments: Any) -> "Future[None]":
    pool = ThreadPoolExecutor(1, thread_name_prefix="staging")
    future = pool.submit(function, *arguments)
    pool.shutdown(wait=False)
    return future


def _owns_memory(parameter: Tensor) -> bool:
    return parameter.untyped_storage().nbytes() == parameter.nbytes
