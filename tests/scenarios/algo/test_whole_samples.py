"""Value, gradient and metrics of a step do not depend on the rows that its episodes are cut into.

The rows of an episode may lie in one micro-batch or in several. Every entry of the registries of
losses, corrections, KL estimators and aggregations is tried.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mcore_rl.algo.aggregation import AGGREGATIONS
from mcore_rl.algo.correction import REJECTIONS, WEIGHTS
from mcore_rl.algo.kl import KL_ESTIMATORS
from mcore_rl.algo.lookup import needs_of
from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.algo.registry import losses
from mcore_rl.algo.sample_sums import add_up_samples, make_known_sums
from mcore_rl.algo.sequences import samples_of_tokens
from mcore_rl.batches.batch import select, with_loss_weights
from mcore_rl.config import AlgorithmConfig, CorrectionConfig, KLConfig
from mcore_rl.types import TrainBatch

CPU = torch.device("cpu")
LENS = (8, 5, 1)
"""Trained tokens of each episode."""
NUM_TRAINED = sum(LENS)
STARTS = (0, 8, 13)
Row = tuple[int, range]
"""(episode, its tokens that the row trains)."""
CUTS: dict[str, list[Row]] = {
    "one row": [(i, range(n)) for i, n in enumerate(LENS)],
    "two rows": [
        (0, range(3)),
        (1, range(2)),
        (2, range(1)),
        (0, range(3, 8)),
        (1, range(2, 5)),
    ],
    "a row a token": [(i, range(t, t + 1)) for i, n in enumerate(LENS) for t in range(n)],
}
SPLITS = [("one row", 3), ("two rows", 1), ("two rows", 2), ("a row a token", 3)]
"""(cut, number of micro-batches), to which the rows are dealt in turn."""
LOSS = AlgorithmConfig(clip_low=0.1, clip_high=0.15, tau_positive=1.2, tau_negative=1.7)
CORRECTION = CorrectionConfig(low=0.3, high=1.3)
QUICK = ("ppo_clip", "gspo", "clip_cov", "dppo_kl", "vespo")
"""Losses that `make test` combines with every correction; they differ in what they sum up."""
REJECT_ABOVE = {
    "none": (0.0, 0.0),
    "token": (0.3, 0.03),
    "sequence": (0.15, 0.03),
    "sequence_sum": (0.6, 0.17),
    "sequence_max": (0.295, 0.04),
}
"""Bounds of k1 and of k2 and k3 that reject some samples, and other rows of two."""


def make_values() -> dict[str, Tensor]:
    """Return the fields of the trained tokens, episode after episode, float64 [NUM_TRAINED]."""
    generator = torch.Generator().manual_seed(5)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(NUM_TRAINED, generator=generator, dtype=torch.float64)

    old = noise(0.3) - 1
    of_episodes = torch.tensor([0.7, -1.1, 0.4], dtype=torch.float64)
    return {
        "logprobs_T": old + noise(0.15),
        "old_logprobs_T": old,
        "rollout_logprobs_T": old + noise(0.25),
        "ref_logprobs_T": old + noise(0.4),
        "advantages_T": of_episodes.repeat_interleave(torch.tensor(LENS)),
        "held_back_T": torch.arange(NUM_TRAINED) % 5 == 1,
    }


def lay_out(rows: Sequence[Row], values: dict[str, Tensor]) -> tuple[TrainBatch, Tensor]:
    """Return (the batch of these rows, at each of its tokens the trained token or -1).

    Each row begins with two tokens of context, and with those of the episode that others train.
    """
    index_T = torch.cat(
        [
            torch.tensor([-1] * (2 + tokens.start) + [STARTS[episode] + t for t in tokens])
            for episode, tokens in rows
        ]
    )
    mask_T = index_T >= 0
    fields: dict[str, Any] = {
        name: value[index_T].masked_fill(~mask_T, 0)
        for name, value in values.items()
        if name != "logprobs_T"
    }
    return TrainBatch(
        token_ids_T=torch.arange(len(index_T)),
        loss_mask_T=mask_T,
        lens_N=tuple(2 + tokens.stop for _, tokens in rows),
        sample_N=tuple(episode for episode, _ in rows),
        **fields,
    ), index_T


def run_step(
    config: AlgorithmConfig,
    rows: Sequence[Row],
    num_microbatches: int,
    values: dict[str, Tensor],
    *,
    of_rows: bool = False,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return (loss, gradient by log-prob of each trained token, sums of metrics) of a step.

    of_rows   take sums from each row by itself, as is right for rows that are samples alone
    """
    leaf = values["logprobs_T"].clone().requires_grad_()
    whole, index_T = lay_out(rows, values)
    whole = with_loss_weights(whole, config.aggregation, 16)
    if of_rows:
        whole = replace(whole, sample_N=None)
    groups = [range(k, len(rows), num_microbatches) for k in range(num_microbatches)]
    microbatches = [select(whole, group) for group in groups]
    indices = [torch.cat([index_T.split(list(whole.lens_N))[i] for i in group]) for group in groups]
    logprobs = [leaf[index].masked_fill(index < 0, -9.0) for index in indices]
    inputs = [
        (x, torch.zeros_like(x), batch) for x, batch in zip(logprobs, microbatches, strict=True)
    ]
    loss_fn = make_policy_loss(config)
    sums: list[Any] = [None] * num_microbatches
    if not of_rows:
        samples = [samples_of_tokens(batch) for batch in microbatches]
        parts = [(partial(loss_fn, *x), s) for x, s in zip(inputs, samples, strict=True)]
        totals = add_up_samples(parts, len(LENS), CPU)
        sums = [make_known_sums(totals, sample_T) for sample_T in samples]
    loss = torch.zeros((), dtype=torch.float64)
    metrics: dict[str, Tensor] = {}
    for x, own_sums in zip(inputs, sums, strict=True):
        loss_T, metrics_T = loss_fn(*x, own_sums)
        assert x[2].loss_weights_T is not None
        loss = loss + (x[2].loss_weights_T.double() * loss_T).sum()
        for name, value_T in metrics_T.items():
            own = value_T[x[2].loss_mask_T].double()
            metrics[name] = metrics.get(name, torch.zeros(())) + own.sum()
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], metrics


def check_invariance(config: AlgorithmConfig) -> None:
    values = make_values()
    wanted = run_step(config, CUTS["one row"], 1, values)
    assert (wanted[1] != 0).any()
    for cut, number in SPLITS:
        found = run_step(config, CUTS[cut], number, values)
        at = (cut, number, config)
        torch.testing.assert_close(
            found, wanted, rtol=1e-12, atol=1e-12, msg=lambda m, at=at: f"{at}: {m}"
        )


@pytest.mark.parametrize(
    "loss",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in losses.names],
)
def test_losses_with_any_correction_do_not_depend_on_rows(loss: str) -> None:
    estimators = cycle(("k1", "k2", "k3"))
    normalize = cycle((False, True))
    for weight, reject in product(WEIGHTS.names, REJECTIONS.names):
        correction = rejecting(reject, next(estimators))
        correction = replace(correction, weight=weight, bound="mask", normalize=next(normalize))
        check_invariance(replace(LOSS, loss=loss, correction=correction))


def rejecting(reject: str, estimator: str) -> CorrectionConfig:
    above = REJECT_ABOVE[reject][estimator != "k1"]
    return replace(CORRECTION, reject=reject, reject_estimator=estimator, reject_above=above)


@pytest.mark.parametrize("reject", sorted(set(REJECTIONS.names) - {"none"}))
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_rejection_by_any_estimate_does_not_depend_on_rows(reject: str, estimator: str) -> None:
    correction = rejecting(reject, estimator)
    recipe = replace(LOSS, loss="policy_gradient", correction=correction)
    check_invariance(recipe)
    _, gradient, _ = run_step(recipe, CUTS["one row"], 1, make_values())
    assert 0 < (gradient == 0).sum() < NUM_TRAINED


@pytest.mark.parametrize("loss", losses.names)
def test_losses_with_any_kl_do_not_depend_on_rows(loss: str) -> None:
    for estimator in KL_ESTIMATORS.names:
        check_invariance(replace(LOSS, loss=loss, kl=KLConfig(0.1, cast(Any, estimator))))


@pytest.mark.parametrize("loss", losses.names)
def test_losses_with_any_aggregation_do_not_depend_on_rows(loss: str) -> None:
    for aggregation in AGGREGATIONS.names:
        check_invariance(replace(LOSS, loss=loss, aggregation=aggregation))


def choices_with_sums() -> list[AlgorithmConfig]:
    """Return a recipe for each entry of the registries that takes sums over samples."""
    recipes = [replace(LOSS, loss=name) for name in losses.names]
    corrections = [replace(CORRECTION, weight=name) for name in WEIGHTS.names]
    corrections += [rejecting(name, "k3") for name in REJECTIONS.names]
    recipes += [replace(LOSS, loss="policy_gradient", correction=x) for x in corrections]
    return [recipe for recipe in recipes if needs_of(recipe).whole_samples]


def test_sums_of_rows_would_be_wrong_for_each_choice_that_needs_whole_samples() -> None:
    """Else the tests above would pass without sums over samples."""
    recipes = choices_with_sums()
    assert len(recipes) >= 9
    for recipe in recipes:
        _, wanted, _ = run_step(recipe, CUTS["two rows"], 1, make_values())
        _, of_rows, _ = run_step(recipe, CUTS["two rows"], 1, make_values(), of_rows=True)
        assert (of_rows - wanted).abs().max() > 1e-3, recipe


@pytest.mark.parametrize("cut", [[(0, range(8))], [(0, range(4)), (0, range(4, 8))]])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_gspo_takes_the_ratio_of_the_episode(cut: list[Row], num_microbatches: int) -> None:
    """The ratios of the halves are exp(-0.5) and exp(0.5), so that of the episode is 1."""
    config = AlgorithmConfig(loss="gspo", aggregation="sequence_mean", clip_low=0.9, clip_high=0.2)
    values = {
        "logprobs_T": torch.tensor([-1.5] * 4 + [-0.5] * 4, dtype=torch.float64),
        "old_logprobs_T": torch.full((8,), -1.0, dtype=torch.float64),
        "advantages_T": torch.ones(8, dtype=torch.float64),
    }
    num_microbatches = min(num_microbatches, len(cut))
    loss, gradient, _ = run_step(config, cut, num_microbatches, values)
    assert loss.item() == pytest.approx(-1.0)
    assert gradient.tolist() == pytest.approx([-0.125] * 8)


def test_the_choices_of_a_recipe_are_those_of_the_registries() -> None:
    for registry, option in ((WEIGHTS, "weight"), (REJECTIONS, "reject")):
        for name in registry.names:
            CorrectionConfig(**{option: name, "reject_above": 0.1})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=option) as refused:
            CorrectionConfig(**{option: "x"})  # type: ignore[arg-type]
        assert all(repr(name) in str(refused.value) for name in registry.names)
