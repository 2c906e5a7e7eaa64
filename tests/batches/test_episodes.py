"""Episodes in stores give the batches that they give when held here, in any cut into rows."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.agents.turn_tree import at_leaves, at_turns
from mcore_rl.batches.assembly import assemble, assemble_parts
from mcore_rl.batches.batch import rows_of_samples, select_each, with_loss_weights
from mcore_rl.batches.episodes import metrics_of, spans_of
from mcore_rl.batches.stored_batch import (
    by_sequence,
    count_trained_tokens,
    in_parts,
    make_stored_batch,
    select_stored,
    with_stored_weights,
    without_truncated,
)
from mcore_rl.types import (
    Prompt,
    Sample,
    VersionSpan,
    WeightVersion,
)
from tests.support.laid_out import make_train_batch
from tests.support.stored import assert_same, put_in_stores, with_all_experts
from tests.support.turn_trees import random_tree, sample_of

KINDS = ["token_mean", "sequence_mean", "constant", "token_sum"]
VERSION = WeightVersion(2)


def make_episodes(seed: int, num_groups: int = 3, size: int = 3) -> list[list[Sample]]:
    """Return groups of random episodes."""
    generator = random.Random(seed)
    groups = []
    for group in range(num_groups):
        prompt = Prompt(group, (1, 2), (), "unit", "7")
        trees = [random_tree(generator, generator.randint(1, 5)) for _ in range(size)]
        groups.append([sample_of(tree, prompt, i) for i, tree in enumerate(trees)])
    return groups


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), num_stores=st.integers(1, 3), data=st.data())
def test_stored_episodes_make_the_batch_of_episodes_held_here(
    seed: int, num_stores: int, data: st.DataObject
) -> None:
    groups = make_episodes(seed)
    samples = [sample for group in groups for sample in group]
    stores, rows = put_in_stores(groups, num_stores)
    here = make_train_batch(samples, VERSION)
    there = make_stored_batch(rows, VERSION)
    assert_same(assemble(there, stores.read), here)
    order = data.draw(st.permutations(range(len(here.lens_N))))
    cut = data.draw(st.integers(1, len(order)))
    kind = data.draw(st.sampled_from(KINDS))
    here, there = with_loss_weights(here, kind, 9), with_stored_weights(there, kind, 9)
    parts = [part for part in (order[:cut], order[cut:]) if part]
    made = [with_all_experts(p) for p in assemble_parts(in_parts(there, parts), stores.read)]
    for micro_batch, expected in zip(made, select_each(here, parts), strict=True):
        assert_same(micro_batch, expected)
    spans = [span for sample in samples for span in sample.versions]
    assert {span.version for span in spans} >= {0}
    for sample, row in zip(samples, rows, strict=True):
        [found] = stores.stores[row.lease.store].samples([row.lease.group], [row.sample_index])
        assert found.response_ids == sample.response_ids
        assert found.versions == sample.versions
        assert found.logprobs == pytest.approx(sample.logprobs)
        assert found.episode is not None and sample.episode is not None
        assert found.episode.turns == sample.episode.turns


def test_empty_episodes_are_left_out() -> None:
    generator = random.Random(2)
    prompt = Prompt(0, (1,), (), "unit", None)
    first, second = (sample_of(random_tree(generator, n), prompt, n) for n in (1, 6))
    assert first.episode is not None and second.episode is not None
    empty = replace(first, response_ids=(), logprobs=(), versions=())
    empty = replace(empty, episode=replace(first.episode, rows=()))
    stores, stored = put_in_stores([[first, empty, second]], 1)
    batch = assemble(make_stored_batch(stored, WeightVersion(0)), stores.read)
    rows = [*first.episode.rows, *second.episode.rows]
    assert batch.lens_N == tuple(len(row.token_ids) for row in rows)
    assert batch.sample_N == (0,) + (1,) * len(second.episode.rows)
    assert batch.token_ids_T.tolist() == [t for row in rows for t in row.token_ids.tolist()]
    assert batch.stale_T is not None and batch.routed_experts_TLK is not None
    stale = [t for t, is_stale in enumerate(batch.stale_T.tolist()) if is_stale]
    assert stale and all(batch.loss_mask_T[t] for t in stale)
    last = sum(batch.lens_N) - 1
    assert (batch.routed_experts_TLK[last] == -1).all()
    with pytest.raises(ValueError, match="all 1 samples are empty"):
        make_stored_batch([stored[1]])


def test_experts_are_left_out_unless_all_rows_have_them() -> None:
    generator = random.Random(3)
    trees = [random_tree(generator, 3, with_experts=has) for has in (True, False)]
    prompt = Prompt(0, (1,), (), "unit", None)
    samples = [sample_of(tree, prompt, i) for i, tree in enumerate(trees)]
    _, stored = put_in_stores([samples], 1)
    batch = make_stored_batch(stored)
    assert batch.routed_experts_TLK is None and batch.version is None


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(KINDS))
def test_a_token_weighs_the_same_in_any_cut(seed: int, kind: str) -> None:
    generator = random.Random(seed)
    prompt = Prompt(0, (1,), (), "unit", None)
    trees = [random_tree(generator, generator.randint(1, 6)) for _ in range(4)]
    weights = []
    for cut in (at_leaves, at_turns):
        samples = [sample_of(tree, prompt, i, cut) for i, tree in enumerate(trees)]
        batch = with_loss_weights(make_train_batch(samples), kind, 64)
        assert batch.loss_weights_T is not None and batch.turn_T is not None
        assert batch.sample_N is not None
        of_turn: dict[tuple[int, int], list[float]] = {}
        parts = zip(
            batch.sample_N,
            batch.turn_T.split(list(batch.lens_N)),
            batch.loss_weights_T.split(list(batch.lens_N)),
            strict=True,
        )
        for sample, turns, values in parts:
            for turn, value in zip(turns.tolist(), values.tolist(), strict=True):
                assert turn >= 0 or value == 0
                if turn >= 0:
                    of_turn.setdefault((sample, turn), []).append(value)
        weights.append(of_turn)
    assert weights[0].keys() == weights[1].keys()
    for key, values in weights[0].items():
        assert weights[1][key] == pytest.approx(values, rel=1e-6)


def test_rows_of_an_episode_stay_together_in_mini_batches() -> None:
    groups = make_episodes(3)
    _, rows = put_in_stores(groups, 2)
    batch = make_stored_batch(rows)
    of_samples = rows_of_samples(batch)
    assert [len(part) for part in of_samples] == [len(row.rows) for row in rows]
    assert max(map(len, of_samples)) > 1
    part = select_stored(batch, of_samples[4] + of_samples[1])
    part = with_stored_weights(part, "sequence_mean", 9)
    assert part.loss_weights_N is not None
    total = (part.loss_weights_N * count_trained_tokens(part)).sum()
    assert total == pytest.approx(1.0)


def test_cut_off_episodes_are_left_out_with_all_rows() -> None:
    [group] = make_episodes(5, num_groups=1)
    cut_off = Sample(**{**vars(group[0]), "finish_reason": "max_turns"})
    samples = [cut_off, *group[1:]]
    _, rows = put_in_stores([samples], 1)
    batch = make_stored_batch(rows)
    left = without_truncated(batch, rows)
    of_first = rows_of_samples(batch)[0]
    assert not left.is_trained_N[of_first].any()
    assert left.is_trained_N.sum() == len(batch.lens_N) - len(of_first)


def test_numbers_by_sample_reach_all_rows() -> None:
    groups = make_episodes(7)
    _, rows = put_in_stores(groups, 1)
    batch = make_stored_batch(rows)
    assert batch.sample_N is not None
    values = by_sequence(batch, np.arange(len(rows), dtype=np.float32))
    assert values.tolist() == [float(n) for n, row in enumerate(rows) for _ in row.rows]


def test_ranks_learn_which_rows_are_of_a_sample_and_where_sums_over_it_come_from() -> None:
    stores, rows = put_in_stores(make_episodes(7), 1)
    batch = make_stored_batch(rows)
    assert batch.sample_N is not None
    order = list(reversed(range(len(batch.lens_N))))
    ordered = in_parts(replace(batch, sums_from="old"), [order[:2], [], order[2:]])
    first, filler, last = assemble_parts(ordered, stores.read)
    numbers = [int(n) for n in reversed(batch.sample_N)]
    assert first.sample_N == tuple(numbers[:2]) and last.sample_N == tuple(numbers[2:])
    assert {part.sums_from for part in (first, filler, last)} == {"old"}
    assert filler.is_filler and not filler.loss_mask_T.any() and filler.sample_N == (0,)


def test_turn_rewards_lie_at_the_last_token_of_a_turn() -> None:
    tree = random_tree(random.Random(1), 4)
    batch = make_train_batch([sample_of(tree, Prompt(0, (1,), (), "unit", None), 0)])
    assert batch.turn_rewards_T is not None and batch.turn_T is not None
    for turn in tree.turns:
        own = batch.turn_rewards_T[batch.turn_T == turn.number]
        assert own.tolist() == [0.0] * (len(turn.token_ids) - 1) + [turn.reward]
    assert torch.equal(batch.turn_T >= 0, batch.loss_mask_T)


def test_spans_and_metrics() -> None:
    assert spans_of([]) == ()
    assert spans_of([3, 3, 1]) == (
        VersionSpan(0, 2, WeightVersion(3)),
        VersionSpan(2, 3, WeightVersion(1)),
    )
    sample = make_episodes(0)[0][0]
    assert sample.episode is not None
    numbers = metrics_of(sample.episode)
    assert numbers["turns"] == len(sample.episode.turns)
    assert numbers["rows"] == len(sample.episode.rows)
