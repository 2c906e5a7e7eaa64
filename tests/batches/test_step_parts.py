"""A step is cut into parts of whole prompts, each near the store of most of its tokens."""

import random
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.batches.stored_batch import cut_by_prompts, home_of, make_stored_batch, take_whole
from mcore_rl.types import GroupLease, Prompt, StoredSample, VersionSpan, WeightVersion

SPANS = (VersionSpan(0, 1, WeightVersion(0)),)


def make_sample(prompt: int, number: int, num_tokens: int, store: int) -> StoredSample:
    own = Prompt(prompt, (1, 2), (), "unit", "")
    return StoredSample(own, number, num_tokens, "stop", SPANS, False, GroupLease(store, prompt))


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), most=st.integers(1, 60), num_stores=st.integers(1, 3))
def test_each_sample_with_tokens_is_in_one_part_with_all_of_its_prompt(
    seed: int, most: int, num_stores: int
) -> None:
    generator = random.Random(seed)
    samples = [
        make_sample(
            generator.randrange(5), n, generator.randrange(8), generator.randrange(num_stores)
        )
        for n in range(20)
    ]
    batch = make_stored_batch(samples)
    parts = cut_by_prompts(batch, samples, most)
    places = [place for part in parts for place in part.places]
    assert len(places) == len(set(places))
    assert {n for n, sample in enumerate(samples) if sample.response_len} <= set(places)
    by_prompt = [{samples[place].prompt.index for place in part.places} for part in parts]
    for k, part in enumerate(parts):
        assert list(part.places) == sorted(part.places)
        of_samples = [samples[place] for place in part.places if samples[place].response_len]
        assert part.batch.index_N.tolist() == [sample.sample_index for sample in of_samples]
        assert all(by_prompt[k].isdisjoint(other) for other in by_prompt[k + 1 :])
        assert sum(part.batch.lens_N) <= most or len(by_prompt[k]) == 1
    assert sum(len(part.batch.lens_N) for part in parts) == len(batch.lens_N)


def test_a_part_is_near_most_of_its_tokens_and_parts_are_as_few_as_the_bound_allows() -> None:
    """Tokens, with 2 of the prompt each: prompt 0 has 5 in store 0 and 8 in store 1."""
    samples = [
        make_sample(0, 0, 3, 0), make_sample(1, 1, 3, 0), make_sample(0, 2, 6, 1),
        make_sample(2, 3, 3, 0), make_sample(3, 4, 0, 1),
    ]  # fmt: skip
    batch = make_stored_batch(samples)
    parts = cut_by_prompts(batch, samples, 10)
    assert [part.places for part in parts] == [(0, 2), (1, 3)]
    assert [home_of(part.batch) for part in parts] == [1, 0]
    assert [part.places for part in cut_by_prompts(batch, samples, 9)] == [(0, 2), (1,), (3,)]
    [whole] = take_whole(batch, samples)
    assert whole.batch is batch and whole.places == (0, 1, 2, 3, 4)


def test_rows_of_episodes_are_numbered_by_their_place_in_the_part() -> None:
    samples = [make_sample(n, n, 2, store) for n, store in enumerate((0, 1, 1, 0))]
    batch = make_stored_batch(samples)
    batch = replace(batch, sample_N=np.array([0, 1, 1, 2]))  # the second and third are one
    parts = cut_by_prompts(batch, [*samples[:2], samples[3]], 100)
    assert [part.batch.index_N.tolist() for part in parts] == [[0, 3], [1, 2]]
    numbers = [part.batch.sample_N for part in parts]
    assert [n.tolist() for n in numbers if n is not None] == [[0, 1], [0, 0]]
