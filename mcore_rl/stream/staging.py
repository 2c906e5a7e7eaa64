"""A second set of a rank's parameters: slices land there beside the decoding, then the two trade places."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mcore_rl.device import synchronize
from mcore_rl.stream.routes.transport import TransferError


class Staging:
    """`tensors` is what the next version is received into; memory: the parameters once more."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        with torch.inference_mode(False):
            self.tensors = {
                name: parameter.detach().clone() for name, parameter in parameters.items()
            }
        self.version: int | None = None
        """What `tensors` holds whole, if anything."""

    def swap(self, version: int, parameters: Mapping[str, Tensor]) -> None:
        """Give the parameters the staged values of `version`, all or none; TransferError if it is not there.

        On the host this is a change of pointers. A device keeps its pointers, which captured graphs refer to,
        and so does a parameter that shares its memory with others.
        """
        if self.version != version:
            raise TransferError(
                f"version {version} is to be swapped in, but {self.version} is staged"
            )
        self.version = None
        for name, parameter in parameters.items():
            staged = self.tensors[name]
            if parameter.is_cpu and parameter.untyped_storage().nbytes() == parameter.nbytes:
                self.tensors[name] = parameter.data
                parameter.data = staged
            else:
                parameter.data.copy_(staged)
        synchronize()
