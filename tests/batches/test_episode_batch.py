"""Episodes held here, as batches; tests/batches/test_episodes.py compares them with stored ones."""

import random
from dataclasses import replace

import pytest

from mcore_rl.batches.episode_batch import make_episode_batch
from mcore_rl.types import Prompt, WeightVersion
from tests.support.turn_trees import random_tree, sample_of

PROMPT = Prompt(0, (1,), (), "unit", None)


def test_rows_are_laid_end_to_end_and_empty_episodes_left_out() -> None:
    generator = random.Random(2)
    first, second = (sample_of(random_tree(generator, n), PROMPT, n) for n in (1, 6))
    assert first.episode is not None and second.episode is not None
    empty = replace(first, response_ids=(), logprobs=(), versions=())
    empty = replace(empty, episode=replace(first.episode, rows=()))
    batch = make_episode_batch([first, empty, second], WeightVersion(0))
    rows = [*first.episode.rows, *second.episode.rows]
    assert batch.lens_N == tuple(len(row.token_ids) for row in rows)
    assert batch.sample_N == (0,) + (1,) * len(second.episode.rows)
    assert batch.token_ids_T.tolist() == [t for row in rows for t in row.token_ids.tolist()]
    assert batch.stale_T is not None and batch.routed_experts_TLK is not None
    stale = [t for t, is_stale in enumerate(batch.stale_T.tolist()) if is_stale]
    assert stale and all(batch.loss_mask_T[t] for t in stale)
    last = sum(batch.lens_N) - 1
    assert (batch.routed_experts_TLK[last] == -1).all()
    with pytest.raises(ValueError, match="all 1 episodes are empty"):
        make_episode_batch([empty])


def test_experts_are_left_out_unless_all_rows_have_them() -> None:
    generator = random.Random(3)
    trees = [random_tree(generator, 3, with_experts=has) for has in (True, False)]
    samples = [sample_of(tree, PROMPT, i) for i, tree in enumerate(trees)]
    batch = make_episode_batch(samples)
    assert batch.routed_experts_TLK is None and batch.stale_T is None
