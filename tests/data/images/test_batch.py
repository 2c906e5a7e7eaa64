"""Images follow their sequences through cuts and micro-batches, and are read once per row."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.batches.assembly import assemble_parts
from mcore_rl.batches.batch import make_filler, select, select_each
from mcore_rl.batches.stored_batch import in_parts, make_stored_batch
from mcore_rl.data.images.batch import (
    join_patches,
    rows_with_images,
    select_images,
    split_images,
    with_images,
)
from mcore_rl.types import StoredSample, TrainBatch
from tests.support.image_prompts import make_image, make_image_prompt, make_patches
from tests.support.stored import Stores, make_sample

NAMES = st.lists(st.lists(st.sampled_from("abc"), max_size=3), min_size=1, max_size=5)


@given(NAMES, st.data())
def test_selecting_sequences_selects_their_images(names: list[list[str]], data: st.DataObject):
    sequences = [[make_patches(make_image(name)) for name in own] for own in names]
    images = join_patches(sequences)
    assert (images is None) == (not any(names))
    index = st.integers(0, len(names) - 1)
    groups = data.draw(st.lists(st.lists(index, max_size=4), max_size=3))
    for found, indices in zip(select_images(images, groups), groups, strict=True):
        wanted = join_patches([sequences[i] for i in indices])
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert found.nums_N == wanted.nums_N
            assert torch.equal(found.pixels_PD, wanted.pixels_PD)
            assert torch.equal(found.grids_I3, wanted.grids_I3)
            assert torch.equal(found.intervals(), wanted.intervals())
    if images is not None:
        assert [len(own) for own in split_images(images)] == [len(own) for own in names]


def test_a_filler_has_no_images() -> None:
    images = join_patches([[make_patches(make_image("a"))], []])
    batch = TrainBatch(torch.arange(5), torch.ones(5, dtype=torch.bool), (3, 2), images=images)
    assert make_filler(batch).images is None
    assert select(batch, [1]).images is None
    [first, both] = select_each(batch, [[0], [1, 0]])
    assert first.images is not None and first.images.nums_N == (1,)
    assert both.images is not None and both.images.nums_N == (0, 1)


def stored_samples(seed: int) -> tuple[Stores, list[StoredSample]]:
    chance = random.Random(seed)
    stores = Stores(2)
    rows: list[StoredSample] = []
    for group in range(6):
        prompt = make_image_prompt(group, chance)
        samples = [replace(make_sample(chance, prompt, i), routed_experts=None) for i in range(3)]
        rows += stores.keep_group(samples)
    chance.shuffle(rows)
    return stores, [row for row in rows if row.response_len]


@pytest.mark.parametrize("seed", range(4))
def test_micro_batches_get_the_images_of_their_prompts(seed: int) -> None:
    stores, rows = stored_samples(seed)
    batch = make_stored_batch(rows)
    num = len(rows)
    parts = [range(0, num, 2), [], range(1, num, 2)]
    cut = in_parts(batch, parts)
    patches = {}
    num_read = 0
    for store, own in rows_with_images(cut).items():
        for row in own:
            images = stores.stores[store].images(*row)
            assert images and (store, row) not in patches
            num_read += 1
            patches[store, row] = [make_patches(image) for image in images]
    assert num_read == sum(bool(row.prompt.images) for row in rows)
    made = with_images(assemble_parts(cut, stores.read), cut, patches)
    for part, indices in zip(made, parts, strict=True):
        wanted = join_patches([list(map(make_patches, rows[i].prompt.images)) for i in indices])
        assert (part.images is None) == (wanted is None)
        if part.images is not None and wanted is not None:
            assert torch.equal(part.images.pixels_PD, wanted.pixels_PD)
            assert part.images.nums_N == wanted.nums_N
    assert made[1].is_filler


def test_a_batch_of_text_alone_asks_for_nothing() -> None:
    _, rows = stored_samples(0)
    text = [row for row in rows if not row.prompt.images]
    batch = make_stored_batch(text)
    assert batch.nums_images_N is None
    assert rows_with_images(batch) == {}
