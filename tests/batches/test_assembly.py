"""Batches assembled from several stores are those of samples held here, bit for bit."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mcore_rl.batches.assembly import (
    assemble,
    assemble_parts,
    column_of,
    columns_of,
    scatter,
    scatter_parts,
)
from mcore_rl.batches.batch import make_filler, select_each, with_loss_weights
from mcore_rl.batches.sample_store import UnknownSampleError
from mcore_rl.batches.stored_batch import (
    in_parts,
    make_stored_batch,
    with_stored_weights,
    without_truncated,
)
from mcore_rl.types import StoredColumn, WeightVersion
from tests.support.laid_out import make_train_batch, mask_truncated
from tests.support.stored import assert_same, make_stored, with_all_experts

VERSION = WeightVersion(1)


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), num_stores=st.integers(1, 3), data=st.data())
def test_any_cut_of_any_order_is_that_of_samples_held_here(
    seed: int, num_stores: int, data: st.DataObject
) -> None:
    stores, samples, rows = make_stored(seed, num_stores=num_stores)
    here = make_train_batch(samples, VERSION)
    there = make_stored_batch(rows, VERSION)
    assert_same(assemble(there, stores.read), here)
    num = len(here.lens_N)
    order = data.draw(st.permutations(range(num)))
    cut = data.draw(st.integers(1, num))
    parts = [order[:cut], [], order[cut:]]
    kind = data.draw(st.sampled_from(["token_mean", "sequence_mean", "constant", "token_sum"]))
    here = with_loss_weights(mask_truncated(here, samples), kind, 9)
    there = with_stored_weights(without_truncated(there, rows), kind, 9)
    shared = in_parts(there, parts)
    made = [with_all_experts(part) for part in assemble_parts(shared, stores.read)]
    expected = select_each(here, [part for part in parts if part])
    assert_same(made[0], expected[0])
    assert made[1].is_filler and made[1].lens_N == (2,)
    filler = make_filler(assemble(shared, stores.read))
    assert_same(made[1], replace(filler, routed_experts_TLK=None))
    for micro_batch, wanted in zip(made[2:], expected[1:], strict=bool(parts[2])):
        if not micro_batch.is_filler:
            assert_same(micro_batch, wanted)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000), num_stores=st.integers(1, 3), layers=st.sampled_from([(), (2,)])
)
def test_a_rank_reads_the_experts_of_its_tokens_and_layers(
    seed: int, num_stores: int, layers: tuple[int, ...]
) -> None:
    stores, samples, rows = make_stored(seed, num_stores=num_stores)
    here = make_train_batch(samples)
    num = len(here.lens_N)
    parts = [range(0, num, 2), [], range(1, num, 2)]
    drawn = random.Random(seed)
    asked: list[Tensor] = []

    def own_tokens(lens_N: tuple[int, ...]) -> Tensor:
        asked.append(torch.tensor([t for t in range(sum(lens_N)) if drawn.random() < 0.5]).long())
        return asked[-1]

    made = assemble_parts(in_parts(make_stored_batch(rows), parts), stores.read, layers, own_tokens)
    expected = iter(select_each(here, [part for part in parts if part]))
    for part, tokens_M in zip(made, asked, strict=True):
        own = part.own_experts
        assert own is not None and torch.equal(own.tokens_M, tokens_M) and own.layers == layers
        if not part.is_filler and len(part.lens_N):
            wanted = next(expected)
            assert wanted.routed_experts_TLK is not None
            kept = list(layers) or slice(None)
            assert torch.equal(own.choices_MLK, wanted.routed_experts_TLK[tokens_M][:, kept])
    ranges = [request.experts_R3 for request in stores.reads[-1].values()]
    num_read = sum(int((r[:, 2] - r[:, 1]).sum()) for r in ranges if r is not None)
    assert num_read == sum(map(len, asked)), "no other tokens are read"


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), num_stores=st.integers(1, 3))
def test_a_rank_reads_the_tokens_that_it_sees(seed: int, num_stores: int) -> None:
    stores, samples, rows = make_stored(seed, num_stores=num_stores)
    here = make_train_batch(samples, VERSION)
    num = len(here.lens_N)
    parts = [range(0, num, 2), [], range(1, num, 2)]
    drawn = random.Random(seed)
    seen: list[Tensor] = []

    def seen_tokens(lens_N: tuple[int, ...]) -> Tensor:
        seen.append(torch.tensor([t for t in range(sum(lens_N)) if drawn.random() < 0.5]).long())
        return seen[-1]

    shared = in_parts(make_stored_batch(rows, VERSION), parts)
    made = assemble_parts(shared, stores.read, seen_tokens=seen_tokens)
    expected = iter(select_each(here, [part for part in parts if part]))
    for part, index in zip(made, seen, strict=True):
        if part.is_filler or not part.lens_N:
            continue
        wanted = next(expected)
        others = torch.ones(len(part.token_ids_T), dtype=torch.bool)
        others[index] = False
        assert torch.equal(part.loss_mask_T, wanted.loss_mask_T), "known from lengths"
        for name in ("token_ids_T", "rollout_logprobs_T", "stale_T"):
            value = getattr(part, name)
            assert torch.equal(value[index], getattr(wanted, name)[index]), name
            assert not value[others].any(), name
        assert part.own_experts is not None and len(part.own_experts.tokens_M) == len(others)
    request = next(iter(stores.reads[-1].values()))
    assert request.experts_R3 is not None
    ranges = [request.tokens_R3 for request in stores.reads[-1].values()]
    num_read = sum(int((r[:, 2] - r[:, 1]).sum()) for r in ranges if r is not None)
    assert num_read == sum(map(len, seen)) or all(r is None for r in ranges)


def test_what_ranks_write_comes_back_in_any_other_cut() -> None:
    stores, _, rows = make_stored(seed=4)
    batch = make_stored_batch(rows, VERSION)
    num = len(batch.lens_N)
    shared = in_parts(batch, [range(0, num, 2), [], range(1, num, 2)])
    values = [torch.randn(sum(batch.lens_N[i] for i in part)) for part in (range(0, num, 2),)]
    values += [torch.zeros(2), torch.randn(sum(batch.lens_N[i] for i in range(1, num, 2)))]
    scatter_parts(shared, {"old_logprobs": values}, stores.write)
    batch = replace(batch, old_logprobs_T=StoredColumn("old_logprobs"))
    old_T = assemble(in_parts(batch, [[*range(0, num, 2), *range(1, num, 2)]]), stores.read)
    assert old_T.old_logprobs_T is not None
    assert torch.equal(old_T.old_logprobs_T, torch.cat([values[0], values[2]]))
    scatter(batch, {"held_back": torch.ones(sum(batch.lens_N), dtype=torch.bool)}, stores.write)
    held = assemble(replace(batch, held_back_T=StoredColumn("held_back")), stores.read)
    assert held.held_back_T is not None and held.held_back_T.all()


def test_values_of_samples_are_spread_over_trained_tokens() -> None:
    stores, samples, rows = make_stored(seed=5)
    batch = make_stored_batch(rows)
    values_N = torch.arange(1.0, 1 + len(batch.lens_N))
    made = assemble(replace(batch, advantages_N=values_N.numpy()), stores.read)
    mask_T = make_train_batch(samples).loss_mask_T
    expected_T = values_N.repeat_interleave(torch.tensor(batch.lens_N)) * mask_T
    assert made.advantages_T is not None and torch.equal(made.advantages_T, expected_T)


def test_fields_name_their_columns_and_lost_samples_are_named() -> None:
    stores, _, rows = make_stored(seed=6)
    assert column_of("old_logprobs_T") == "old_logprobs"
    assert column_of("routed_experts_TLK") == "routed_experts"
    batch = make_stored_batch(rows)
    assert "stale_T" not in columns_of(batch)
    assert columns_of(replace(batch, version=VERSION))["stale_T"] == "stale"
    lost = rows[0].lease
    stores.stores[lease_store := lost.store].drop([lost.group])
    with pytest.raises(UnknownSampleError, match=f"of group {lost.group} is not in the store"):
        assemble(batch, stores.read)
    assert lease_store in (0, 1)


@pytest.mark.parametrize("layers", [(), (1,)])
def test_a_rank_reads_the_keys_of_its_tokens_and_layers(layers: tuple[int, ...]) -> None:
    """They lie beside experts, or alone; a sequence's last token has none."""
    for beside in (True, False):
        stores, samples, rows = make_stored(4, num_stores=2, indexer_topk=4, experts=beside)
        whole = assemble(make_stored_batch(rows), stores.read)
        assert whole.indexer_topk_TLK is not None
        assert whole.indexer_topk_TLK.dtype == torch.int32
        first = 0
        present = [sample for sample in samples if sample.response_len]
        for sample, length in zip(present, whole.lens_N, strict=True):
            assert sample.indexer_topk is not None
            keys_TLK = whole.indexer_topk_TLK[first : first + length]
            assert torch.equal(keys_TLK[:-1], sample.indexer_topk.int())
            assert (keys_TLK[-1] == -1).all()
            first += length
        num = len(whole.lens_N)
        parts = [range(0, num, 2), range(1, num, 2)]
        stored = in_parts(make_stored_batch(rows), parts)
        made = assemble_parts(
            stored, stores.read, layers, lambda lens_N: torch.arange(0, sum(lens_N), 2)
        )
        for part, wanted in zip(made, select_each(whole, parts), strict=True):
            assert wanted.indexer_topk_TLK is not None and part.own_keys is not None
            assert part.indexer_topk_TLK is None and part.own_keys.layers == layers
            kept = list(layers) or slice(None)
            assert torch.equal(part.own_keys.choices_MLK, wanted.indexer_topk_TLK[::2][:, kept])
            assert (part.own_experts is not None) == beside
