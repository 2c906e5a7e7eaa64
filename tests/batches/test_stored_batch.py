"""Batches of references: what is selected, weighted and sent."""

import pickle

import numpy as np
import pytest

from mcore_rl.batches.stored_batch import (
    count_trained_tokens,
    find_stored_sharing,
    in_parts,
    make_stored_batch,
    select_stored,
    with_stored_weights,
)
from mcore_rl.types import GroupLease, Prompt, RowFacts, StoredSample, VersionSpan, WeightVersion


def make_rows(*lens: int, has_experts: bool = True) -> list[StoredSample]:
    prompt = Prompt(0, (1, 2, 3), (), "unit", "")
    spans = (VersionSpan(0, 1, WeightVersion(0)),)
    return [
        StoredSample(prompt, i, num, "stop", spans, has_experts, GroupLease(i % 2, 5))
        for i, num in enumerate(lens)
    ]


def test_samples_without_a_response_are_left_out() -> None:
    batch = make_stored_batch(make_rows(4, 0, 2))
    assert batch.lens_N == (7, 5) and batch.index_N.tolist() == [0, 2]
    assert count_trained_tokens(batch).tolist() == [4, 2]
    assert batch.routed_experts_TLK is not None
    assert make_stored_batch(make_rows(4, has_experts=False)).routed_experts_TLK is None
    with pytest.raises(ValueError, match="all 1 samples are empty"):
        make_stored_batch(make_rows(0))


def test_parts_are_laid_end_to_end_and_empty_ones_are_fillers() -> None:
    batch = make_stored_batch(make_rows(4, 3, 2))
    shared = in_parts(batch, [[2, 0], [], [1]])
    assert shared.parts == (2, 0, 1) and shared.index_N.tolist() == [2, 0, 1]
    assert in_parts(batch, [[]]).lens_N == (7,)
    assert select_stored(batch, [1]).store_N.tolist() == [1]


def test_weights_count_whole_sequences() -> None:
    batch = with_stored_weights(make_stored_batch(make_rows(4, 2)), "sequence_mean", 8)
    assert batch.loss_weights_N is not None
    assert batch.loss_weights_N.dtype == np.float32
    assert batch.loss_weights_N.tolist() == [0.125, 0.25]


def test_a_batch_of_thousands_travels_in_a_few_bytes_per_sequence() -> None:
    batch = make_stored_batch(make_rows(*[5] * 4000))
    assert len(pickle.dumps(batch)) < 60 * 4000


def test_responses_share_their_prompt_with_the_one_before() -> None:
    prompts = [Prompt(n, tuple(range(num)), (), "unit", "") for n, num in enumerate((8, 3))]
    spans = (VersionSpan(0, 1, WeightVersion(0)),)
    samples = [
        StoredSample(prompt, i, num, "stop", spans, False, GroupLease(0, prompt.index))
        for prompt in prompts
        for i, num in enumerate((4, 0, 2, 5))
    ]
    batch = make_stored_batch(samples)
    sharing = find_stored_sharing(batch)
    assert sharing.parents == (-1, 0, 1, -1, -1, -1), "three tokens are too few"
    assert sharing.starts == (0, 7, 7, 0, 0, 0)
    assert find_stored_sharing(select_stored(batch, [2, 0, 5])).parents == (-1, -1, -1)
    chosen = find_stored_sharing(select_stored(batch, [2, 5, 1]))
    assert chosen.parents == (2, -1, -1) and chosen.order == (1, 2, 0)


def test_rows_of_episodes_share_what_their_collector_found() -> None:
    prompt = Prompt(0, tuple(range(8)), (), "unit", "")
    spans = (VersionSpan(0, 1, WeightVersion(0)),)
    rows = [(RowFacts(0, 20, 5), RowFacts(1, 25, 6, 0, 12)), (RowFacts(2, 19, 4, 0, 7),)]
    samples = [
        StoredSample(prompt, i, 9, "done", spans, False, GroupLease(0, 3), of_sample)
        for i, of_sample in enumerate(rows)
    ]
    sharing = find_stored_sharing(make_stored_batch(samples))
    assert sharing.parents == (-1, 0, 0) and sharing.starts == (0, 12, 7)
