"""Copies what a rank would lose with its process to kept memory, and back.

kept                                              made again
main weights, moments, frozen weights, buffers    gradients, weights in bfloat16
optimizer steps, learning rates, generators       the reference (from model.path)

Two generations alternate, so that a rank that dies within a copy has the one before.
"""

import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_rl.device import default_generators
from mcore_rl.train.checkpoint_check import load_safely
from mcore_rl.train.offload import DeviceMemory, list_optimizer_tensors
from mcore_rl.train.optimizer import parts_of
from mcore_rl.train.recovery.generation import Generation, StateLostError, count_bytes
from mcore_rl.train.runtime import rng_state, set_rng_state


class RankState:
    """The state of one rank's share of a model, and the kept memory for its copies."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        memory: DeviceMemory,
    ) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._memory = memory
        self._generations: list[Generation] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of kept memory that one copy needs."""
        return count_bytes(self._list_bytes())

    def use(self, paths: Sequence[str]) -> None:
        """Keep copies in the memory at these paths, which may hold copies of an earlier process.

        Raises ValueError if a path cannot be opened.
        """
        self._generations = [Generation(path) for path in paths]

    @property
    def kept_steps(self) -> list[int]:
        """The steps whose copies are whole."""
        return sorted(g.step for g in self._generations if g.step is not None)

    def keep(self, step: int, optimizer_steps: int) -> tuple[int, int]:
        """Copy the state after `step` in the place of the oldest copy.

        Parts of the model may be moved out to host memory. Returns (number of the copy, its bytes).
        """
        ages = [-1 if copy.step is None else copy.step for copy in self._generations]
        oldest = ages.index(min(ages))
        small = self._read_small(optimizer_steps)
        return oldest, self._generations[oldest].write(step, small, self._list_bytes())

    @torch.no_grad()
    def restore(self, step: int) -> int:
        """Go back to the state after `step`; return the optimizer steps that it had taken.

        All parts must be in device memory. A collective over all ranks. Raises StateLostError if
        the copy is not whole.
        """
        kept = next((g for g in self._generations if g.step == step), None)
        if kept is None:
            raise StateLostError(f"the state of step {step} is not in memory: {self.kept_steps}")
        small = kept.read(step, self._list_bytes())
        for later in self._generations:
            if later.step is not None and later.step > step:
                later.clear()  # of a step that is done again
        optimizer_steps = self._write_small(load_safely(io.BytesIO(small), "a rank's kept state"))
        for part in parts_of(self._optimizer):
            part._copy_main_params_to_model_params()
        for chunk in self._chunks:
            chunk.start_param_sync(force_sync=True)
        return optimizer_steps

    def _list_bytes(self) -> list[Tensor]:
        """Return the bytes of all kept tensors, each storage once, in an order that never changes.

        A storage that is moved out gives its copy in host memory.
        """
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in self._list_tensors():
            storage = tensor.untyped_storage()
            storages.setdefault(storage._cdata, storage)
        found = (self._memory.read_bytes(storage) for storage in storages.values())
        return [bytes_B for bytes_B in found if bytes_B.numel()]

    def _list_tensors(self) -> Iterator[Tensor]:
        yield from list_optimizer_tensors(self._optimizer)
        for chunk in self._chunks:
            yield from unwrap_model(chunk).buffers()
            for parameter in chunk.parameters():
                if not parameter.requires_grad:
                    yield parameter.detach()

    def _read_small(self, optimizer_steps: int) -> bytes:
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for part in parts_of(self._optimizer)
            for group in part.optimizer.param_groups
        ]
        file = io.BytesIO()
        rng = rng_state(default_generators())
        torch.save({"steps": optimizer_steps, "groups": groups, "rng": rng}, file)
        return file.getvalue()

    def _write_small(self, small: dict[str, Any]) -> int:
        parts = parts_of(self._optimizer)
        groups = [group for part in parts for group in part.optimizer.param_groups]
        for group, saved in zip(groups, small["groups"], strict=True):
            group.update(saved)
        set_rng_state(small["rng"], default_generators())
        return small["steps"]
