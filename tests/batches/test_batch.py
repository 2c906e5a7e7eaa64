"""Train batches from samples, selection, mini-batches."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.batches.batch import make_filler, plan_mini_batches, select, with_loss_weights
from mcore_rl.batches.local_stores import LocalStores
from mcore_rl.batches.stored_batch import make_stored_batch, without_truncated
from mcore_rl.types import Prompt, Sample, VersionSpan, WeightVersion
from tests.support.laid_out import make_train_batch


def make_sample(
    prompt_ids: tuple[int, ...], response_ids: tuple[int, ...], index: int = 0
) -> Sample:
    spans = (VersionSpan(0, len(response_ids), WeightVersion(0)),) if response_ids else ()
    logprobs = tuple(-0.1 * (i + 1) for i in range(len(response_ids)))
    return Sample(
        Prompt(index, prompt_ids, (), "unit", "x"), 0, response_ids, logprobs, "stop", spans, ""
    )


def test_prompt_and_response_are_laid_end_to_end() -> None:
    samples = [make_sample((1, 2, 3), (4, 5)), make_sample((6,), (7, 8, 9), 1)]
    stores = LocalStores()
    rows = stores.keep(samples)
    batch = stores.assemble(make_stored_batch(rows))
    assert batch.lens_N == (5, 4)
    assert batch.token_ids_T.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert batch.loss_mask_T.tolist() == [False] * 3 + [True] * 2 + [False] + [True] * 3
    assert batch.rollout_logprobs_T is not None
    assert batch.rollout_logprobs_T.tolist() == pytest.approx(
        [0, 0, 0, -0.1, -0.2, 0, -0.1, -0.2, -0.3]
    )


def test_empty_responses_are_left_out_and_all_empty_is_refused() -> None:
    stores = LocalStores()
    rows = stores.keep([make_sample((1,), ()), make_sample((2,), (3,), 1)])
    batch = stores.assemble(make_stored_batch(rows))
    assert batch.token_ids_T.tolist() == [2, 3]
    with pytest.raises(ValueError, match="all 1 samples are empty"):
        make_stored_batch(rows[:1])


def test_select_keeps_every_field_of_the_chosen_sequences() -> None:
    samples = [make_sample((i,), (10 + i,) * (i + 1)) for i in range(4)]
    batch = with_loss_weights(make_train_batch(samples), "token_mean", 8)
    part = select(batch, [3, 1])
    assert part.lens_N == (5, 3)
    assert part.token_ids_T.tolist() == [3, 13, 13, 13, 13, 1, 11, 11]
    assert part.loss_weights_T is not None and part.loss_weights_T[
        part.loss_mask_T
    ].tolist() == pytest.approx([0.1] * 6)
    assert part.ref_logprobs_T is None


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 3), st.integers(0, 5))
def test_every_sequence_is_in_one_step_of_each_epoch(
    num: int, mini_batches: int, epochs: int, seed: int
) -> None:
    steps = plan_mini_batches(num, mini_batches, epochs, seed)
    seen = sorted(i for step in steps for i in step)
    assert seen == sorted(list(range(num)) * epochs)
    assert all(steps)
    if num >= mini_batches:
        assert len(steps) == mini_batches * epochs
        sizes = [len(step) for step in steps]
        assert max(sizes) - min(sizes) <= 1
    assert steps == plan_mini_batches(num, mini_batches, epochs, seed)


def test_a_filler_has_two_tokens_and_no_weight() -> None:
    """Also where the second token of the batch is trained, after a prompt of one."""
    batch = with_loss_weights(make_train_batch([make_sample((1,), (2, 3))]), "token_mean", 8)
    assert batch.loss_mask_T.tolist() == [False, True, True]
    filler = make_filler(batch)
    assert filler.lens_N == (2,) and filler.is_filler
    assert filler.token_ids_T.tolist() == [1, 2]
    assert filler.loss_mask_T.tolist() == [False, False]
    assert filler.loss_weights_T is not None and not filler.loss_weights_T.any()


def test_engine_records_follow_the_tokens() -> None:
    experts = torch.arange(2 * 3 * 2, dtype=torch.int16).view(3, 2, 2)[:, :, :1]
    spans = (VersionSpan(0, 1, WeightVersion(4)), VersionSpan(1, 2, WeightVersion(5)))
    prompt = Prompt(0, (1, 2), (), "unit", "x")
    samples = [
        Sample(prompt, i, (3, 4), (-0.1, -0.2), "stop", spans, "", experts) for i in range(2)
    ]
    batch = make_train_batch(samples, WeightVersion(5))
    assert batch.stale_T is not None and batch.stale_T.tolist() == [False, False, True, False] * 2
    assert batch.routed_experts_TLK is not None
    assert batch.routed_experts_TLK[:, 0, 0].tolist() == [0, 4, 8, -1] * 2
    part = select(batch, [1])
    assert part.routed_experts_TLK is not None and torch.equal(part.routed_experts_TLK[:3], experts)
    with pytest.raises(ValueError, match="routed experts of 3 tokens, expected 4"):
        Sample(
            prompt,
            0,
            (3, 4, 5),
            (0.0,) * 3,
            "stop",
            (VersionSpan(0, 3, WeightVersion(0)),),
            "",
            experts,
        )


def test_responses_that_were_cut_off_are_left_out_of_the_loss() -> None:
    samples = [make_sample((1,), ()), make_sample((2,), (3, 4)), make_sample((5,), (6,))]
    samples[1] = replace(samples[1], finish_reason="length")
    stores = LocalStores()
    rows = stores.keep(samples)
    batch = make_stored_batch(rows)
    left = without_truncated(batch, rows)
    assert stores.assemble(left).loss_mask_T.tolist() == [False] * 4 + [True]
    assert left.lens_N == batch.lens_N
