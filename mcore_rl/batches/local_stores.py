"""Sample stores in one process, for machines and tests without Ray.

They have the methods of cluster.stores.StoreHandles, which ranks call, and of
cluster.collectors.CollectorGroup, which the loop's roles call.

samples of engines  --keep-->  StoredSamples  --make_stored_batch-->  StoredBatch
                      |                                                  |
                 SampleStores  <------ read and write: assemble, apply ---+
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeVar
from weakref import finalize

from torch import Tensor

from mcore_rl.batches.assembly import (
    OwnTokens,
    all_tokens,
    apply_to_stored,
    assemble,
    assemble_parts,
    scatter_parts,
)
from mcore_rl.batches.group_facts import describe_group, refer_to_samples
from mcore_rl.batches.kept_rows import ReadRequest
from mcore_rl.batches.sample_store import SampleStore
from mcore_rl.types import (
    Array,
    GroupLease,
    Sample,
    StoredBatch,
    StoredSample,
    TokenWork,
    TrainBatch,
)

T = TypeVar("T")


class LocalStores:
    """Sample stores of this process, which take groups in turn. Nothing here is ever lost."""

    def __init__(self, num_stores: int = 1, num_experts: int = 0) -> None:
        """`num_experts`: see SampleStore."""
        self.stores = [SampleStore(num_experts) for _ in range(num_stores)]
        self._num_groups = 0

    @property
    def num_groups(self) -> int:
        """The groups that something refers to."""
        return sum(store.num_groups for store in self.stores)

    def keep(self, samples: Iterable[Sample]) -> list[StoredSample]:
        """Keep samples as long as something refers to them; return them by reference, in order.

        Neighbors with the same prompt are a group, whose samples are numbered through.
        """
        kept: list[StoredSample] = []
        for _, group in groupby(samples, key=lambda sample: sample.prompt.index):
            kept += self.keep_group(list(group))
        return kept

    def keep_group(self, samples: Sequence[Sample]) -> list[StoredSample]:
        """Keep the samples of one prompt."""
        group = self._num_groups
        self._num_groups += 1
        lease = GroupLease(group % len(self.stores), group)
        store = self.stores[lease.store]
        store.put(group, samples)
        finalize(lease, store.drop, [group])
        return refer_to_samples(samples[0].prompt, lease, describe_group(group, samples))

    def samples(self, samples: Sequence[StoredSample]) -> list[Sample]:
        """Return whole samples, in their order."""
        places = [(sample.lease, sample.sample_index) for sample in samples]
        return [self.stores[at.store].samples([at.group], [index])[0] for at, index in places]

    def read(self, requests: Mapping[int, ReadRequest]) -> dict[int, Mapping[str, Array]]:
        """Return columns by store and name."""
        return {store: self.stores[store].read(request) for store, request in requests.items()}

    def write(self, parts: Mapping[int, tuple[Array, Array, Mapping[str, Array]]]) -> None:
        """Write (group_N, index_N, columns by name) by store."""
        for store, part in parts.items():
            self.stores[store].write(*part)

    def assemble(self, batch: StoredBatch) -> TrainBatch:
        """Return the batch with its tokens."""
        return assemble(batch, self.read)

    def assemble_parts(
        self,
        batch: StoredBatch,
        layers: Sequence[int] = (),
        own_tokens: OwnTokens = all_tokens,
        seen_tokens: OwnTokens = all_tokens,
    ) -> list[TrainBatch]:
        """Return the batch's micro-batches; see assembly.assemble_parts."""
        return assemble_parts(batch, self.read, layers, own_tokens, seen_tokens)

    def scatter_parts(self, batch: StoredBatch, columns: Mapping[str, Sequence[Tensor]]) -> None:
        """Write the values of micro-batches' tokens, by column."""
        scatter_parts(batch, columns, self.write)

    def apply(
        self, works: Sequence[tuple[TokenWork[T], StoredBatch]]
    ) -> list[tuple[StoredBatch, T]]:
        """Call each function on its batch with tokens; implements roles.OnTokens."""
        made = []
        for function, batch in works:
            columns, returned = apply_to_stored(function, batch, self.read, self.write)
            made.append((replace(batch, **columns), returned))
        return made
