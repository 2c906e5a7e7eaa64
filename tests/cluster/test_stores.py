"""Samples of two stores in processes of their own, read and written through handles."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.batches.batch import select_each
from mcore_rl.batches.kept_rows import ReadRequest
from mcore_rl.batches.sample_store import SampleStore
from mcore_rl.batches.stored_batch import in_parts, make_stored_batch
from mcore_rl.cluster.group import RankGroup
from mcore_rl.cluster.placement import reserve
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.cluster.stores import StoreHandles
from mcore_rl.config import ClusterConfig
from mcore_rl.planning.bundles import plan_ranks
from mcore_rl.types import StoredColumn
from tests.support.laid_out import make_train_batch
from tests.support.stored import assert_same, make_stored, with_all_experts

pytestmark = pytest.mark.e2e


class StoreWorker:
    """A store alone, filled with the samples that a seed makes."""

    def __init__(self, seed: int, index: int) -> None:
        self._stores, _, _ = make_stored(seed)  # a store drops what nothing refers to
        self._store: SampleStore = self._stores.stores[index]

    def read(self, request: ReadRequest) -> Any:
        return self._store.read(request)

    def write(self, *part: Any) -> None:
        self._store.write(*part)


@pytest.fixture(scope="module")
def handles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreHandles]:
    folder: Path = tmp_path_factory.mktemp("stores")
    with open_ray_session(ClusterConfig(object_store_mib=80), num_cpus=2):
        [slots] = reserve([plan_ranks(2, 0.5, gpus_per_node=0)], timeout_s=20)
        group = RankGroup("store", slots, folder, threads=4)
        group.build(StoreWorker, [(7, 0), (7, 1)], deadline_s=60)
        yield StoreHandles(group.actors, 30.0)
        group.kill()


def test_micro_batches_of_samples_in_two_processes(handles: StoreHandles) -> None:
    _, samples, rows = make_stored(seed=7)
    here = make_train_batch(samples)
    batch = make_stored_batch(rows)
    assert_same(handles.assemble(batch), here)
    num = len(here.lens_N)
    parts = [range(0, num, 2), range(1, num, 2)]
    shared = in_parts(batch, parts)
    pairs = zip(handles.assemble_parts(shared, ()), select_each(here, parts), strict=True)
    for made, expected in pairs:
        assert_same(with_all_experts(made), expected)
    values = [torch.randn(sum(here.lens_N[i] for i in part)) for part in parts]
    handles.scatter_parts(shared, {"values": values})
    read = handles.assemble(replace(shared, values_T=StoredColumn("values"))).values_T
    assert read is not None and torch.equal(read, torch.cat(values))
    whole = in_parts(batch, [range(num)])
    handles.scatter_parts(whole, {"returns": [torch.ones(sum(here.lens_N))]})
    returns_T = handles.assemble(replace(batch, returns_T=StoredColumn("returns"))).returns_T
    assert returns_T is not None and returns_T.sum() == sum(here.lens_N)


def test_a_column_that_was_never_written_is_named_with_its_store(handles: StoreHandles) -> None:
    _, _, rows = make_stored(seed=7)
    batch = replace(make_stored_batch(rows), ref_logprobs_T=StoredColumn("ref_logprobs"))
    with pytest.raises(RuntimeError, match=r"sample store [01] .*KeyError: 'ref_logprobs'"):
        handles.assemble(batch)
