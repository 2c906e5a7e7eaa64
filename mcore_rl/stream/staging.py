"""Holds a second set of a rank's parameters: filled while the engine decodes, then swapped in."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mcore_rl.device import synchronize
from mcore_rl.stream.routes.transport import TransferError


class Staging:
    """Holds the next version in `tensors`; takes as much memory as the parameters themselves."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        with torch.inference_mode(False):
            self.tensors = {
                name: parameter.detach().clone() for name, parameter in parameters.items()
            }
        self.version: int | None = None
        """The version that `tensors` holds completely, or None."""

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
            owns_memory = parameter.untyped_storage().nbytes() == parameter.nbytes
            if parameter.is_cpu and owns_memory:
                self.tensors[name] = parameter.data
                parameter.data = staged
            else:
                parameter.data.copy_(staged)
        synchronize()
