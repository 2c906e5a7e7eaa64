"""A node's images in shared memory and in Ray's store, read by ranks here and elsewhere."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.batches.group_facts import describe_group, refer_to_samples
from mcore_rl.batches.kept_rows import ReadRequest
from mcore_rl.batches.sample_store import SampleStore
from mcore_rl.batches.stored_batch import in_parts, make_stored_batch
from mcore_rl.cluster import stores as stores_module
from mcore_rl.cluster.group import RankGroup
from mcore_rl.cluster.placement import reserve
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.cluster.stores import StoreHandles, share_array
from mcore_rl.config import ClusterConfig
from mcore_rl.data.images.batch import GroupRow
from mcore_rl.data.images.processor import ImageProcessor, digest_of
from mcore_rl.planning.bundles import plan_ranks
from mcore_rl.types import GroupLease, Images, Prompt, PromptImage, StoredSample
from mcore_rl.workers.collector_worker import NodeImages, PatchMaker
from tests.support.odd_images import encode, noise, write_processor
from tests.support.stored import make_sample

pytestmark = pytest.mark.e2e


def make_prompt(group: int) -> Prompt:
    """Return a prompt of as many images as its number says; image 0 is the same in all."""
    images = []
    for number in range(group):
        data = encode(noise(24, 16 + 8 * number, seed=number))
        images.append(PromptImage(digest_of(data, 40), data, 0, 40, f"image {number}"))
    return Prompt(group, (1, 2), (), "unit", "7", images=tuple(images))


def fill(store: SampleStore) -> list[StoredSample]:
    chance = random.Random(3)
    rows = []
    for group in range(4):
        samples = [
            replace(make_sample(chance, make_prompt(group), i), routed_experts=None)
            for i in range(3)
        ]
        store.put(group, samples)
        facts = describe_group(group, samples)
        rows += refer_to_samples(samples[0].prompt, GroupLease(0, group), facts)
    return [row for row in rows if row.response_len]


class ImageWorker:
    """A store of samples with images alone."""

    def __init__(self, folder: Path) -> None:
        self._store = SampleStore()
        fill(self._store)
        self._images = NodeImages(PatchMaker(folder, 1 << 20), self._store, share_array)
        processor = ImageProcessor(folder)
        self._images.patches._make = lambda image: processor.patches(_encoded(image), 40)

    def read(self, request: ReadRequest) -> Any:
        return self._store.read(request)

    def place_images(self, rows: list[GroupRow]) -> Any:
        return self._images.place(rows)

    def put_images(self, rows: list[GroupRow]) -> Any:
        return self._images.put(rows)

    def num_made(self) -> int:
        return self._images.patches.num_made


def _encoded(image: PromptImage) -> Any:
    from mcore_rl.data.images.encoded import EncodedImage

    return EncodedImage(image.data, image.where)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    folder = tmp_path_factory.mktemp("images")
    write_processor(folder / "model")
    with open_ray_session(ClusterConfig(object_store_mib=80), num_cpus=1):
        [slots] = reserve([plan_ranks(1, 0.5, gpus_per_node=0)], timeout_s=20)
        group = RankGroup("store", slots, folder, threads=4)
        group.build(ImageWorker, [(folder / "model",)], deadline_s=60)
        yield group
        group.kill()


def joined(handles: StoreHandles, *, with_pixels: bool) -> list[Images | None]:
    rows = fill(SampleStore())
    batch = in_parts(make_stored_batch(rows), [range(3), range(3, len(rows)), []])
    parts = handles.assemble_parts(batch, ())
    return [part.images for part in handles.with_images(parts, batch, with_pixels=with_pixels)]


def test_ranks_here_map_and_others_fetch_the_same_pixels(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = StoreHandles(group.actors, 30.0)
    here = joined(handles, with_pixels=True)
    assert [images is None for images in here] == [True, False, True]
    assert group.call_all("num_made", deadline_s=30) == [3]
    monkeypatch.setattr(stores_module, "map_patches", lambda placed: None)
    elsewhere = joined(handles, with_pixels=True)
    grids_only = joined(handles, with_pixels=False)
    for mapped, fetched, grids in zip(here, elsewhere, grids_only, strict=True):
        if mapped is not None and fetched is not None and grids is not None:
            assert torch.equal(mapped.pixels_PD, fetched.pixels_PD)
            assert torch.equal(mapped.grids_I3, fetched.grids_I3)
            assert torch.equal(mapped.grids_I3, grids.grids_I3)
            assert grids.pixels_PD.is_meta and not fetched.pixels_PD.is_meta
            assert mapped.nums_N == fetched.nums_N == grids.nums_N
    assert group.call_all("num_made", deadline_s=30) == [3]
