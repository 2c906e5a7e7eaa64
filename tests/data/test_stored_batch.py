"""Batches of references: what is selected, weighted and sent."""

import pickle

import numpy as np
import pytest

from mcore_rl.data.stored_batch import (
    in_parts,
    make_stored_batch,
    select_stored,
    trained_lens,
    with_stored_weights,
)
from mcore_rl.types import GroupLease, Prompt, StoredSample, VersionSpan, WeightVersion


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
    assert trained_lens(batch).tolist() == [4, 2]
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
