"""Which tokens Clip-Cov and KL-Cov hold back, and that it depends on the mini-batch and the seed
alone.
"""

from dataclasses import replace

import pytest
import torch

from mcore_rl.algo.covariance import pick_largest, with_held_back
from mcore_rl.algo.lookup import losses
from mcore_rl.config import AlgorithmConfig, CorrectionConfig, CovarianceConfig
from mcore_rl.types import TrainBatch

ADVANTAGES = [9.0, 2.0, -2.0, 2.0, 1.0, 0.0, -1.0, -2.0]
OLD = [-9.0, -0.1, -5.0, -4.0, -1.0, -2.0, -3.0, -3.5]
MASK = [False] + [True] * 7


def make_batch() -> TrainBatch:
    return TrainBatch(
        torch.arange(8),
        torch.tensor(MASK),
        (3, 5),
        advantages_T=torch.tensor(ADVANTAGES),
        old_logprobs_T=torch.tensor(OLD),
    )


def covariances() -> list[float]:
    pairs = [(a, p) for a, p, m in zip(ADVANTAGES, OLD, MASK, strict=True) if m]
    mean_a, mean_p = (sum(x) / len(pairs) for x in zip(*pairs, strict=True))
    return [float("nan"), *((a - mean_a) * (p - mean_p) for a, p in pairs)]


def held_back(config: AlgorithmConfig, seed: int = 0) -> list[int]:
    pick = losses.needs(config.loss).held_back
    assert pick is not None
    mask_T = with_held_back(make_batch(), config, pick, seed)[0].held_back_T
    assert mask_T is not None
    return mask_T.nonzero()[:, 0].tolist()


def test_kl_cov_holds_back_the_largest_share() -> None:
    config = AlgorithmConfig(loss="kl_cov", covariance=CovarianceConfig(share=0.3))
    largest = sorted(range(1, 8), key=lambda t: covariances()[t])[-2:]
    assert held_back(config) == sorted(largest)


def test_clip_cov_holds_back_a_random_share_of_those_between_the_bounds() -> None:
    config = AlgorithmConfig(
        loss="clip_cov", covariance=CovarianceConfig(share=0.15, low=0.5, high=4.0)
    )
    between = {t for t in range(1, 8) if 0.5 < covariances()[t] < 4.0}
    picked = [tuple(held_back(config, seed)) for seed in range(30)]
    assert all(len(tokens) == 1 for tokens in picked)
    assert len(between) > 1 and {t for tokens in picked for t in tokens} == between
    assert held_back(config, 7) == held_back(config, 7)
    nowhere = replace(config, covariance=CovarianceConfig(share=0.15, low=100.0, high=200.0))
    assert held_back(nowhere) == []


def test_other_losses_hold_back_nothing_and_missing_inputs_are_refused() -> None:
    batch = make_batch()
    assert losses.needs("ppo_clip").held_back is None
    with pytest.raises(ValueError, match=r"algorithm.loss=kl_cov needs old log-probs"):
        with_held_back(
            replace(batch, old_logprobs_T=None), AlgorithmConfig(loss="kl_cov"), pick_largest, 0
        )


def test_without_a_pass_of_the_trainer_the_engines_log_probs_serve() -> None:
    config = AlgorithmConfig(
        loss="kl_cov",
        covariance=CovarianceConfig(share=0.3),
        correction=CorrectionConfig(bypass=True),
    )
    batch = replace(make_batch(), old_logprobs_T=None, rollout_logprobs_T=torch.tensor(OLD))
    whole, _ = with_held_back(
        make_batch(), replace(config, correction=CorrectionConfig()), pick_largest, 0
    )
    held_back_T = with_held_back(batch, config, pick_largest, 0)[0].held_back_T
    assert held_back_T is not None and whole.held_back_T is not None
    assert held_back_T.tolist() == whole.held_back_T.tolist()
