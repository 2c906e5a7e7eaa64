"""Context-parallel parts of a micro-batch hold every token and every target exactly once."""

from dataclasses import replace

import pytest
import torch

from mcore_rl.algo.sequences import samples_of_tokens
from mcore_rl.device.attention import zigzag_positions
from mcore_rl.train.packing import local_sources, make_rank_batch, pad_lens
from mcore_rl.types import OwnChoices, TrainBatch


def make_batch(lens_N: tuple[int, ...]) -> TrainBatch:
    tokens_T = torch.arange(1, sum(lens_N) + 1)
    return TrainBatch(
        tokens_T, torch.ones_like(tokens_T).bool(), lens_N, loss_weights_T=tokens_T / 10.0
    )


@pytest.mark.parametrize("lens_N", [(5,), (8, 8), (1, 13, 4), (3, 3, 3, 3)])
@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2)])
def test_every_token_is_predicted_once(lens_N: tuple[int, ...], cp: int, tp: int) -> None:
    batch = make_batch(lens_N)
    parts = [make_rank_batch(batch, rank, cp, tp) for rank in range(cp)]
    assert sum(part.num_tokens for part in parts) == sum(lens_N)
    firsts = set(torch.tensor((0, *lens_N[:-1])).cumsum(0).tolist())
    targets = sorted(t for part in parts for t in part.targets_T.tolist() if t >= 0)
    assert targets == sorted(set(range(sum(lens_N))) - firsts)
    for part in parts:
        assert len(part.tokens_T) * cp == sum(pad_lens(lens_N, cp, tp))
        assert len(part.tokens_T) % tp == 0
        real_T = part.sources_T >= 0
        assert torch.equal(part.tokens_T[real_T], batch.token_ids_T[part.sources_T[real_T]])
        assert int(real_T.sum()) == part.num_tokens
        has_target = part.targets_T >= 0
        assert torch.equal(part.labels_T[has_target], part.tokens_T[has_target] + 1)
        assert torch.equal(part.batch.loss_mask_T, has_target)
        assert part.batch.loss_weights_T is not None
        assert not part.batch.loss_weights_T[~has_target].any()
        padding_T = torch.zeros_like(has_target) if part.padding_T is None else part.padding_T
        assert int((~padding_T).sum()) == part.num_tokens
        assert not (padding_T & has_target).any()


def test_a_filler_counts_nowhere() -> None:
    part = make_rank_batch(replace(make_batch((2,)), is_filler=True), 0, 1, 2)
    assert part.num_tokens == 0
    assert part.padding_T is not None and part.padding_T.all()
    assert (part.sources_T == -1).all()


def test_tokens_lie_where_attention_expects_them() -> None:
    lens_N, cp = (6, 16, 3), 2
    padded_N = pad_lens(lens_N, cp, 1)
    for rank in range(cp):
        part = make_rank_batch(make_batch(lens_N), rank, cp, 1)
        _, positions_T = zigzag_positions(padded_N, rank, cp)
        assert torch.equal(part.positions_T, positions_T)


@pytest.mark.parametrize(
    ("lens_N", "cp", "tp", "wanted"),
    [
        ((5, 3), 1, 1, (5, 3)),
        ((5, 3), 1, 4, (5, 3)),
        ((5, 4), 1, 4, (5, 7)),
        ((5, 3), 2, 1, (8, 4)),
        ((5, 3), 2, 2, (8, 8)),
    ],
)
def test_padding_is_no_more_than_needed(
    lens_N: tuple[int, ...], cp: int, tp: int, wanted: tuple[int, ...]
) -> None:
    assert pad_lens(lens_N, cp, tp) == wanted


@pytest.mark.parametrize(
    ("cp", "tp", "wanted"), [(1, 1, (5, 11)), (1, 2, (5, 27)), (2, 1, (8, 24)), (2, 2, (8, 56))]
)
def test_every_rank_gets_a_multiple_of_the_rows_that_its_products_take(
    cp: int, tp: int, wanted: tuple[int, ...]
) -> None:
    assert pad_lens((5, 3), cp, tp, rows=16) == wanted
    batch = make_batch((5, 3))
    for rank in range(cp):
        assert len(make_rank_batch(batch, rank, cp, tp, rows=16).tokens_T) // tp % 16 == 0


@pytest.mark.parametrize("cp", [1, 2])
def test_tokens_are_summed_by_the_sample_of_their_sequence(cp: int) -> None:
    batch = replace(make_batch((5, 3, 4)), sample_N=(7, 2, 7), sums_from="old")
    sums = torch.zeros(8)
    for rank in range(cp):
        targets = make_rank_batch(batch, rank, cp, 1).batch
        assert targets.sums_from == "old"
        sums.index_add_(0, samples_of_tokens(targets), targets.loss_mask_T.float())
    assert sums.tolist() == [0, 0, 2, 0, 0, 0, 0, 4 + 3], "all tokens but the first of a sequence"


def test_experts_belong_to_the_token_itself_and_padding_has_none() -> None:
    experts_TLK = torch.arange(5 * 2 * 3, dtype=torch.int16).view(5, 2, 3)
    batch = replace(make_batch((5,)), routed_experts_TLK=experts_TLK)
    for rank in range(2):
        part = make_rank_batch(batch, rank, 2, 1)
        for rows in (slice(0, 4), slice(1, 3)):
            for layers in (slice(0, 2), slice(1, 2)):
                named_TLK = part.experts(rows, layers)
                assert named_TLK is not None
                real_T = part.sources_T[rows] >= 0
                wanted_TLK = experts_TLK[part.sources_T[rows][real_T]][:, layers]
                assert torch.equal(named_TLK[real_T], wanted_TLK)
                assert (named_TLK[~real_T] == -1).all()
    assert make_rank_batch(make_batch((5,)), 0, 2, 1).experts(slice(0, 4), slice(0, 1)) is None


@pytest.mark.parametrize(
    ("cp_size", "tp_size", "rows"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 4)]
)
def test_the_experts_of_own_tokens_are_all_that_a_rank_needs(
    cp_size: int, tp_size: int, rows: int
) -> None:
    lens_N = (5, 1, 6, 9)
    experts_TLK = torch.arange(21 * 2 * 3, dtype=torch.int16).reshape(21, 2, 3)
    whole = replace(make_batch(lens_N), routed_experts_TLK=experts_TLK)
    routed = torch.zeros(21, dtype=torch.int64)
    for cp_rank in range(cp_size):
        layout = (cp_rank, cp_size, tp_size, rows)
        expected = make_rank_batch(whole, *layout)
        sources_T = local_sources(lens_N, *layout)
        assert torch.equal(sources_T, expected.sources_T)
        for share in torch.arange(len(sources_T)).chunk(tp_size):
            part = slice(int(share[0]), int(share[-1]) + 1)
            tokens_M = sources_T[part][sources_T[part] >= 0].sort().values
            routed[tokens_M] += 1
            own = OwnChoices(tokens_M, experts_TLK[tokens_M][:, 1:], layers=(1,))
            batch = make_rank_batch(replace(make_batch(lens_N), own_experts=own), *layout)
            made, wanted = (b.experts(part, slice(1, 2)) for b in (batch, expected))
            assert made is not None and wanted is not None and torch.equal(made, wanted)
    assert (routed == 1).all(), "each token is routed by one rank"


def test_experts_of_other_tokens_are_noticed() -> None:
    own = OwnChoices(torch.tensor([0, 1, 4]), torch.zeros(3, 2, 3, dtype=torch.int16))
    batch = make_rank_batch(replace(make_batch((5,)), own_experts=own), 0, 1, 1)
    with pytest.raises(AssertionError, match="experts or keys of other tokens"):
        batch.experts(slice(0, 5), slice(0, 2))


def test_only_the_last_stage_gets_what_the_loss_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rl.train.packing.on_device", lambda value: value.to("meta"))
    experts_MLK = torch.zeros(7, 2, 3, dtype=torch.int16)
    batch = replace(make_batch((5, 2)), routed_experts_TLK=experts_MLK)
    part = make_rank_batch(batch, 0, 2, 1)
    for is_last in (False, True):
        placed = part.on_device(targets=is_last)
        read = (placed.tokens_T, placed.positions_T, placed.sequences_T, placed.cu_seqlens_N1)
        assert placed.padding_T is not None and placed.padding_T.is_meta
        assert all(value.is_meta for value in read)
        assert not placed.sources_T.is_meta and not placed.targets_T.is_meta
        assert placed.named is not None
        assert placed.named.choices_MLK is experts_MLK
        assert {v.is_meta for v in placed.batch.token_fields().values()} == {is_last}


def test_the_picture_of_the_module_is_what_it_does() -> None:
    parts = [make_rank_batch(make_batch((5,)), rank, 2, 1) for rank in range(2)]
    assert [part.sources_T.tolist() for part in parts] == [[0, 1, -1, -1], [2, 3, 4, -1]]
    assert [part.targets_T.tolist() for part in parts] == [[1, 2, -1, -1], [3, 4, -1, -1]]
    assert [part.sequences_T.tolist() for part in parts] == [[0] * 4] * 2
    assert [part.max_len for part in parts] == [8, 8]


@pytest.mark.parametrize(("cp_size", "tp_size"), [(1, 1), (2, 1), (1, 2)])
def test_keys_are_positions_among_the_packed_tokens_of_all_ranks(
    cp_size: int, tp_size: int
) -> None:
    """A key of a token is the packed token of the same sequence with that position."""
    lens_N = (5, 1, 6)
    keys_TLK = torch.tensor([[[t, t - 1], [0, -1]] for n in lens_N for t in range(n)]).int()
    whole = replace(make_batch(lens_N), indexer_topk_TLK=keys_TLK)
    packed: dict[tuple[int, int], int] = {}
    sizes = pad_lens(lens_N, cp_size, tp_size)
    for n, size in enumerate(sizes):
        packed |= {(n, t): sum(sizes[:n]) + t for t in range(size)}
    for cp_rank in range(cp_size):
        layout = (cp_rank, cp_size, tp_size)
        batch = make_rank_batch(whole, *layout)
        tokens_M = batch.sources_T[batch.sources_T >= 0].sort().values
        own = OwnChoices(tokens_M, keys_TLK[tokens_M][:, 1:], layers=(1,))
        cut = make_rank_batch(replace(make_batch(lens_N), own_keys=own), *layout)
        assert torch.equal(cut.keys(1), batch.keys(1))
        found = batch.keys(0)
        assert found.dtype == torch.int32
        for row, n, t, source in zip(
            found.tolist(),
            batch.sequences_T.tolist(),
            batch.positions_T.tolist(),
            batch.sources_T.tolist(),
            strict=True,
        ):
            before = packed[n, t - 1] if t else -1
            assert row == ([packed[n, t], before] if source >= 0 else [-1, -1])
