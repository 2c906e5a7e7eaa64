"""Holds a second set of a rank's parameters: filled while the engine decodes, then swapped in."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mcore_rl.device import synchronize
from mcore_rl.stream.routes.transport import TransferError
from mcore_rl.stream.segment import Segment, allocate_like


class Staging:
    """Holds the next version in `tensors`; takes as much memory as the parameters themselves.

    On the host both sets lie in memory that other processes can map, so parameters move there.
    """

    def __init__(self, parameters: Mapping[str, Tensor], live: Segment | None = None) -> None:
        """Allocate the second set.

        `live`: the segment of an earlier Staging in which the parameters lie now.
        """
        self.segments: tuple[Segment, Segment] | None = None
        """The memory of both sets, if that is on the host. The second one is new."""
        with torch.inference_mode(False):
            if all(parameter.is_cpu for parameter in parameters.values()):
                live = live or _move_to_segment(parameters)
                staged, self.tensors = allocate_like(parameters)
                self.segments = live, staged
            else:
                self.tensors = {
                    name: torch.empty_like(parameter) for name, parameter in parameters.items()
                }
        self.version: int | None = None
        """The version that `tensors` holds completely, or None."""

    def fill(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy the parameters' values, because padding comes with no version."""
        for name, parameter in parameters.items():
            self.tensors[name].copy_(parameter.detach())

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
    own = {name: parameter for name, parameter in parameters.items() if _owns_memory(parameter)}
    segment, moved = allocate_like(own)
    for name, parameter in own.items():
        moved[name].copy_(parameter.detach())
        parameter.data = moved[name]
    return segment


def _owns_memory(parameter: Tensor) -> bool:
    return parameter.untyped_storage().nbytes() == parameter.nbytes
