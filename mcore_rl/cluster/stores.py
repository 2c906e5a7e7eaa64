"""Reads and writes the sample stores of all collectors, from any process of the run.

Every read and write raises SamplesLost if a store lost its process, once the others have answered.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError
from torch import Tensor

from mcore_rl.cluster.actor_start import BULK
from mcore_rl.cluster.answers import cause_of_death
from mcore_rl.cluster.rank_actor import NotBuilt, Raised
from mcore_rl.data.assembly import (
    OwnTokens,
    all_tokens,
    assemble,
    assemble_parts,
    scatter,
    scatter_parts,
)
from mcore_rl.data.kept_rows import ReadRequest
from mcore_rl.lost_samples import SamplesLost, join_losses
from mcore_rl.types import Array, StoredBatch, TrainBatch


class StoreHandles:
    """The collectors as stores, by number; the same object serves in controller and ranks."""

    def __init__(self, actors: Sequence[Any], timeout_s: float) -> None:
        """`timeout_s` bounds each read and write, of all stores at once."""
        self._actors = actors
        self._timeout_s = timeout_s

    def read(self, requests: Mapping[int, ReadRequest]) -> dict[int, Mapping[str, Array]]:
        """Return columns by store and name. Raises RuntimeError naming a store that failed."""
        calls = {store: ("read", request) for store, request in requests.items()}
        return self._call(calls)

    def write(self, parts: Mapping[int, tuple[Array, Array, Mapping[str, Array]]]) -> None:
        """Write (group_N, index_N, columns by name) by store. Raises RuntimeError as `read`."""
        self._call({store: ("write", *part) for store, part in parts.items()})

    def assemble(self, batch: StoredBatch) -> TrainBatch:
        """Return the batch with its tokens."""
        return assemble(batch, self.read)

    def assemble_parts(
        self,
        batch: StoredBatch,
        layers: Sequence[int],
        own_tokens: OwnTokens = all_tokens,
        seen_tokens: OwnTokens = all_tokens,
    ) -> list[TrainBatch]:
        """Return the batch's micro-batches; see data.assembly.assemble_parts."""
        return assemble_parts(batch, self.read, layers, own_tokens, seen_tokens)

    def scatter(self, batch: StoredBatch, columns: Mapping[str, Tensor]) -> None:
        """Bring the values of a batch's tokens, by column, to the stores of its samples."""
        scatter(batch, columns, self.write)

    def scatter_parts(self, batch: StoredBatch, columns: Mapping[str, Sequence[Tensor]]) -> None:
        """Do as `scatter` with a tensor per micro-batch."""
        scatter_parts(batch, columns, self.write)

    def _call(self, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        refs = [
            self._actors[store].call.options(concurrency_group=BULK).remote(self._timeout_s, *call)
            for store, call in calls.items()
        ]
        until_s = time.monotonic() + self._timeout_s
        answers = {
            store: _answer(store, ref, max(until_s - time.monotonic(), 0.0))
            for store, ref in zip(calls, refs, strict=True)
        }
        if losses := [a for a in answers.values() if isinstance(a, SamplesLost)]:
            raise join_losses(losses)
        return answers


def _answer(store: int, ref: Any, timeout_s: float) -> Any:
    """Return a store's answer, or a SamplesLost if its process is gone."""
    name = f"sample store {store} (collector rank {store})"
    try:
        answer = ray.get(ref, timeout=timeout_s)
    except RayActorError as error:
        return SamplesLost(f"{name} died ({cause_of_death(str(error))})", [store])
    if isinstance(answer, NotBuilt):
        return SamplesLost(f"{name} died and is starting again", [store])
    if isinstance(answer, Raised):
        raise RuntimeError(f"{name}: {answer.summary}")
    return answer
