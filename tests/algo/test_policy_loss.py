"""The token loss of a recipe against float64: terms, metrics, masking, on and off policy."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.algo.lookup import losses
from mcore_rl.algo.policy_loss import make_policy_loss, sft_loss
from mcore_rl.algo.sequences import sequence_sum
from mcore_rl.batches.batch import select
from mcore_rl.config import AlgorithmConfig, CorrectionConfig, KLConfig
from mcore_rl.types import TrainBatch

LENS = (3, 4)
MASK = torch.tensor([0, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
CONFIG = AlgorithmConfig(clip_low=0.2, clip_high=0.28, entropy_coef=0.01, kl=KLConfig(0.1, "k3"))


def make_batch(**fields: Any) -> TrainBatch:
    return TrainBatch(torch.arange(7), MASK, LENS, **fields)


def make_inputs() -> tuple[torch.Tensor, torch.Tensor, TrainBatch]:
    generator = torch.Generator().manual_seed(3)
    new, old, ref, advantages = torch.randn(4, 7, generator=generator, dtype=torch.float64) * 0.3
    entropy = torch.rand(7, generator=generator, dtype=torch.float64)
    rollout = old + torch.linspace(-0.4, 0.4, 7, dtype=torch.float64)
    batch = make_batch(
        old_logprobs_T=old - 1,
        ref_logprobs_T=ref - 1,
        rollout_logprobs_T=rollout - 1,
        advantages_T=advantages,
    )
    return (new - 1).requires_grad_(), entropy.requires_grad_(), batch


def test_loss_is_ratio_plus_kl_minus_entropy() -> None:
    logprobs, entropy, batch = make_inputs()
    loss, metrics = make_policy_loss(CONFIG)(logprobs, entropy, batch)
    assert batch.advantages_T is not None and batch.old_logprobs_T is not None
    assert batch.ref_logprobs_T is not None and batch.rollout_logprobs_T is not None
    x, h = logprobs.detach(), entropy.detach()
    ratio = (x - batch.old_logprobs_T).exp()
    surrogate = torch.minimum(
        ratio * batch.advantages_T, ratio.clamp(0.8, 1.28) * batch.advantages_T
    )
    to_ref = batch.ref_logprobs_T - x
    kl = to_ref.exp() - to_ref - 1
    difference = batch.old_logprobs_T - batch.rollout_logprobs_T
    gap = difference.exp()
    expected = {
        "loss/policy": -surrogate,
        "loss/entropy": h,
        "kl/ref": kl,
        "kl/old_new": ratio - 1 - (x - batch.old_logprobs_T),
        "ratio/mean": ratio,
        "ratio/token_max": ratio,
        "logprob_diff/mean": difference.abs(),
        "logprob_diff/token_max": difference.abs(),
        "logprob_diff/clipped_share": ((gap < 0.8) | (gap > 1.28)).float(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(metrics[name][MASK], value[MASK], msg=name, check_dtype=False)
        assert not metrics[name].requires_grad, name
    assert set(metrics) == {*expected, "clip/low_share", "clip/high_share"}
    assert 0 < metrics["logprob_diff/clipped_share"].sum() < MASK.sum()
    torch.testing.assert_close(loss[MASK], (-surrogate + 0.1 * kl - 0.01 * h)[MASK])
    loss_fn = make_policy_loss(CONFIG)
    assert torch.autograd.gradcheck(lambda a, b: loss_fn(a, b, batch)[0], (logprobs, entropy))


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e4])
def test_nothing_off_the_mask_counts(junk: float) -> None:
    logprobs, entropy, batch = make_inputs()
    fields = ("advantages_T", "old_logprobs_T", "ref_logprobs_T", "rollout_logprobs_T")
    spoiled = replace(
        batch, **{name: getattr(batch, name).masked_fill(~MASK, junk) for name in fields}
    )
    loss_fn = make_policy_loss(CONFIG)
    loss, metrics = loss_fn(logprobs, entropy, batch)
    spoiled_loss, spoiled_metrics = loss_fn(logprobs, entropy, spoiled)
    gradients = torch.autograd.grad((loss * MASK).sum(), (logprobs, entropy))
    spoiled_gradients = torch.autograd.grad((spoiled_loss * MASK).sum(), (logprobs, entropy))
    torch.testing.assert_close(spoiled_loss, loss)
    torch.testing.assert_close(spoiled_metrics, metrics)
    torch.testing.assert_close(spoiled_gradients, gradients)
    assert all(not g[~MASK].any() for g in gradients)


def test_without_old_logprobs_the_batch_is_on_policy() -> None:
    logprobs, entropy, batch = make_inputs()
    assert batch.advantages_T is not None and batch.rollout_logprobs_T is not None
    on_policy = replace(batch, old_logprobs_T=None, ref_logprobs_T=None)
    loss, metrics = make_policy_loss(AlgorithmConfig())(logprobs, entropy, on_policy)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(gradient, torch.where(MASK, -batch.advantages_T, 0.0))
    assert metrics["ratio/mean"].tolist() == [1.0] * 7 and not metrics["kl/old_new"].any()
    expected = (logprobs.detach() - batch.rollout_logprobs_T).abs()
    torch.testing.assert_close(metrics["logprob_diff/mean"][MASK], expected[MASK])


def test_a_runaway_token_stays_finite_in_float32() -> None:
    logprobs = torch.tensor([0.0, 0.0, -1.0, 0.0, 0.0, 0.0, -300.0], requires_grad=True)
    batch = make_batch(
        advantages_T=torch.full((7,), -1.0),
        old_logprobs_T=torch.full((7,), -200.0),
        ref_logprobs_T=torch.zeros(7),
        rollout_logprobs_T=torch.full((7,), -400.0),
    )
    loss, _ = make_policy_loss(CONFIG)(logprobs, torch.ones(7), batch)
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad is not None and logprobs.grad.isfinite().all()


def test_missing_inputs_are_refused() -> None:
    logprobs, entropy, batch = make_inputs()
    with pytest.raises(ValueError, match=r"algorithm.kl.coef=0.1 needs batch.ref_logprobs_T"):
        make_policy_loss(CONFIG)(logprobs, entropy, replace(batch, ref_logprobs_T=None))
    with pytest.raises(ValueError, match="advantages_T"):
        make_policy_loss(CONFIG)(logprobs, entropy, replace(batch, advantages_T=None))


@pytest.mark.parametrize("option", ["loss", "aggregation"])
def test_an_unknown_option_is_refused_when_the_loss_is_made(option: str) -> None:
    with pytest.raises(ValueError, match=f"algorithm.{option}='x'"):
        make_policy_loss(replace(CONFIG, **{option: "x"}))


def test_the_loss_travels_to_other_processes() -> None:
    logprobs, entropy, batch = make_inputs()
    loss_fn = make_policy_loss(CONFIG)
    copy = pickle.loads(pickle.dumps(loss_fn))
    torch.testing.assert_close(
        copy(logprobs, entropy, batch)[0], loss_fn(logprobs, entropy, batch)[0]
    )


def test_sft_loss_is_the_negative_log_likelihood() -> None:
    logprobs, entropy, _ = make_inputs()
    loss, metrics = sft_loss(logprobs, entropy, make_batch())
    torch.testing.assert_close(loss, torch.where(MASK, -logprobs, 0.0))
    torch.testing.assert_close(metrics["loss/nll"], loss.detach())
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient.tolist() == [-float(m) for m in MASK]


def test_the_correction_weighs_the_policy_loss_alone() -> None:
    logprobs, entropy, batch = make_inputs()
    correction = CorrectionConfig(weight="token", high=1.1)
    loss, metrics = make_policy_loss(replace(CONFIG, correction=correction))(
        logprobs, entropy, batch
    )
    plain, _ = make_policy_loss(CONFIG)(logprobs, entropy, batch)
    assert batch.old_logprobs_T is not None and batch.rollout_logprobs_T is not None
    weight = (batch.old_logprobs_T - batch.rollout_logprobs_T).exp().clamp(max=1.1)
    torch.testing.assert_close(metrics["correction/weight"][MASK], weight[MASK])
    torch.testing.assert_close((plain - loss)[MASK], ((1 - weight) * metrics["loss/policy"])[MASK])
    with pytest.raises(ValueError, match=r"algorithm.correction needs batch.rollout_logprobs_T"):
        unknown = replace(batch, rollout_logprobs_T=None)
        make_policy_loss(replace(CONFIG, correction=correction))(logprobs, entropy, unknown)


def test_bypassed_the_engines_log_probs_are_the_old_ones_and_the_drift_is_still_seen() -> None:
    logprobs, entropy, batch = make_inputs()
    config = AlgorithmConfig(correction=CorrectionConfig(bypass=True))
    alone = replace(batch, old_logprobs_T=None, ref_logprobs_T=None)
    loss, metrics = make_policy_loss(config)(logprobs, entropy, alone)
    as_old = replace(alone, old_logprobs_T=batch.rollout_logprobs_T)
    torch.testing.assert_close(
        loss, make_policy_loss(AlgorithmConfig())(logprobs, entropy, as_old)[0]
    )
    assert batch.rollout_logprobs_T is not None
    drift = (logprobs.detach() - batch.rollout_logprobs_T).abs()
    torch.testing.assert_close(metrics["logprob_diff/mean"][MASK], drift[MASK])


@pytest.mark.parametrize("loss", losses.names)
def test_no_loss_depends_on_micro_batches_or_on_where_sequences_lie(loss: str) -> None:
    """Cut between sequences, and each sequence on two ranks: loss and gradient within 1e-12 in
    float64.
    """
    logprobs, entropy, batch = make_inputs()
    held_back = torch.tensor([0, 1, 0, 0, 0, 0, 1], dtype=torch.bool)
    batch = replace(batch, held_back_T=held_back)
    correction = CorrectionConfig(weight="sequence", reject="sequence", reject_above=0.2)
    loss_fn = make_policy_loss(replace(CONFIG, loss=loss, correction=correction))
    whole, _ = loss_fn(logprobs, entropy, batch)
    (gradient,) = torch.autograd.grad(whole[MASK].sum(), logprobs)

    rows = [slice(0, 3), slice(3, 7)]
    parts = [loss_fn(logprobs[r], entropy[r], select(batch, [i]))[0] for i, r in enumerate(rows)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)

    indices, lens = [torch.tensor([0, 2, 3, 6]), torch.tensor([1, 4, 5])], [(2, 2), (1, 2)]
    barrier, parts_of_sums = threading.Barrier(2), [torch.zeros(0)] * 2

    def on_rank(rank: int) -> Tensor:
        def add_others(sums_N: Tensor) -> None:
            parts_of_sums[rank] = sums_N.clone()
            barrier.wait(30)
            sums_N.copy_(parts_of_sums[0] + parts_of_sums[1])
            barrier.wait(30)

        index = indices[rank]
        fields: dict[str, Any] = {
            name: value[index] for name, value in batch.token_fields().items()
        }
        sums = sequence_sum(lens[rank], torch.device("cpu"), add_others)
        return loss_fn(
            logprobs[index], entropy[index], TrainBatch(lens_N=lens[rank], **fields), sums
        )[0]

    with ThreadPoolExecutor(2) as pool:
        on_ranks = list(pool.map(on_rank, range(2)))
    order = torch.cat(indices).argsort()
    total = torch.cat(on_ranks)[order]
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(total[MASK].sum(), logprobs)[0], gradient)
