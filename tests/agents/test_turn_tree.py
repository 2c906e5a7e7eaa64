"""Rows of a turn tree train each sampled token once, after the tokens that it was sampled after."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.agents.turn_tree import Cut, TurnTree, at_leaves, at_turns, rows_of
from mcore_rl.types import Row
from tests.support.turn_trees import random_tree

Trained = dict[int, list[tuple[int, float, int, tuple[int, ...]]]]


@given(seed=st.integers(0, 10**6), num_turns=st.integers(1, 12))
def test_any_cut_trains_each_sampled_token_once(seed: int, num_turns: int) -> None:
    tree = random_tree(random.Random(seed), num_turns)
    generator = random.Random(seed + 1)

    def some_more(tree: TurnTree) -> list[int]:
        ends = [*at_leaves(tree), *generator.choices(at_turns(tree), k=generator.randint(0, 3))]
        generator.shuffle(ends)
        return ends

    expected = {turn.number: _as_sampled(tree, turn.number) for turn in tree.turns}
    cuts: list[Cut] = [at_leaves, at_turns, some_more]
    for cut in cuts:
        assert _trained(rows_of(tree, cut)) == expected


def _as_sampled(tree: TurnTree, number: int) -> list[tuple[int, float, int, tuple[int, ...]]]:
    """Return, for each token of an answer, (id, log-prob, version, all tokens before it)."""
    turn = tree.turns[number]
    path = tree.path_ids(number)
    start = len(path) - len(turn.token_ids)
    versions = [v for span in turn.versions for v in [span.version] * (span.stop - span.start)]
    return [
        (token, np.float32(logprob).item(), version, path[: start + i])
        for i, (token, logprob, version) in enumerate(
            zip(turn.token_ids, turn.logprobs, versions, strict=True)
        )
    ]


def _trained(rows: tuple[Row, ...]) -> Trained:
    trained: Trained = {}
    for row in rows:
        version_T = {t: s.version for s in row.versions for t in range(s.start, s.stop)}
        ids = row.token_ids.tolist()
        for t in np.flatnonzero(row.is_trained).tolist():
            entry = (ids[t], row.logprobs[t].item(), version_T[t], tuple(ids[:t]))
            trained.setdefault(int(row.turn_T[t]), []).append(entry)
    return trained


@given(seed=st.integers(0, 10**6), num_turns=st.integers(1, 8))
def test_experts_are_those_of_the_first_run_of_each_token(seed: int, num_turns: int) -> None:
    tree = random_tree(random.Random(seed), num_turns)
    for row, end in zip(rows_of(tree, at_turns), at_turns(tree), strict=True):
        assert row.routed_experts is not None
        known = 0
        for turn in tree.path(end):
            stop = len(tree.path_ids(turn.number)) - 1
            assert turn.routed_experts is not None
            own = turn.routed_experts[known - turn.experts_start : stop - turn.experts_start]
            assert torch.equal(row.routed_experts[known:stop], own)
            known = stop
        assert known == len(row.token_ids) - 1


def test_a_tree_of_forks_alone_has_a_row_each_and_a_chain_one() -> None:
    chain = random_tree(random.Random(0), 1)
    for number in range(1, 4):
        turn = random_tree(random.Random(number), 1, with_experts=False).turns[0]
        chain.add(type(turn)(**{**vars(turn), "number": number, "parent": number - 1}))
    assert len(rows_of(chain)) == 1 and len(rows_of(chain, at_turns)) == 4
    assert rows_of(chain)[0].routed_experts is None


def test_turns_are_added_in_order() -> None:
    tree = random_tree(random.Random(0), 2)
    with pytest.raises(AssertionError):
        tree.add(tree.turns[0])
