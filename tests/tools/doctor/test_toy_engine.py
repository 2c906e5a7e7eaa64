"""Cuts deal out every element; engine ranks together hold every tensor."""

import pytest
import torch

from mcore_rl.tools.doctor.toy_engine import (
    Cut,
    FusedEngine,
    ToySizes,
    column_cut,
    expert_cut,
    make_tensors,
    row_cut,
)

SIZES = ToySizes(hidden=8, heads=2, head=4, experts=6, inner=4, vocab=9)


@pytest.mark.parametrize("cut", [row_cut, column_cut, expert_cut])
def test_the_parts_of_all_ranks_make_up_each_tensor(cut: Cut) -> None:
    full = make_tensors(3, SIZES)
    seen = {name: torch.full_like(tensor, float("nan")) for name, tensor in full.items()}
    for rank in range(3):
        shards, tensors = cut(full, rank, 3, "float32")
        for shard in shards:
            place = tuple(map(slice, shard.box.start, shard.box.stop))
            seen[shard.box.name][place] = shard.view(tensors)
    assert all(torch.equal(seen[name], tensor) for name, tensor in full.items())


def test_experts_are_dealt_out_and_the_rest_is_on_every_rank() -> None:
    names = [
        {s.box.name for s in expert_cut(make_tensors(0, SIZES), r, 3, "float32")[0]}
        for r in range(3)
    ]
    experts = [{name for name in own if name.startswith("experts.")} for own in names]
    assert [len(own) for own in experts] == [6, 6, 6]
    assert not experts[0] & experts[1] and not experts[1] & experts[2]
    assert all("norm.weight" in own for own in names)


def test_two_engine_ranks_hold_the_halves_of_one() -> None:
    full = make_tensors(1, SIZES)
    whole = FusedEngine(0, 1, torch.float32, SIZES)
    halves = [FusedEngine(rank, 2, torch.float32, SIZES) for rank in range(2)]
    for engine in (whole, *halves):
        engine.load_weights(full.items())
        assert not any(torch.isnan(tensor).any() for tensor in engine.parameters())
    assert torch.equal(torch.cat([half.w2 for half in halves], 2), whole.w2)
    gates = torch.cat([half.w13[:, : SIZES.inner // 2] for half in halves], 1)
    assert torch.equal(gates, whole.w13[:, : SIZES.inner])
    rows = torch.cat([half.embed for half in halves])[: SIZES.vocab]
    assert torch.equal(rows, whole.embed)


def test_the_same_seed_makes_the_same_values_in_any_dtype() -> None:
    one, again = make_tensors(5, SIZES), make_tensors(5, SIZES)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert make_tensors(5, SIZES, torch.bfloat16)["norm.weight"].dtype == torch.bfloat16
    assert {name: tuple(tensor.shape) for name, tensor in one.items()} == SIZES.shapes
