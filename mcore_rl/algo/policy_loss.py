"""Makes the losses that train ranks apply to each micro-batch, from the recipe's options."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from mcore_rl.algo.aggregation import AGGREGATIONS
from mcore_rl.algo.correction import correction_weights, old_policy
from mcore_rl.algo.diagnostics import log_ratio, logprob_diff, policy_drift
from mcore_rl.algo.kl import KL_ESTIMATORS
from mcore_rl.algo.lookup import UserFile, loss_of, user_file_of
from mcore_rl.algo.preferences import PAIR_LOSSES
from mcore_rl.algo.registry import LossTokens, Metrics, PolicyLoss, losses
from mcore_rl.algo.sequences import Sequences, SequenceSum, sequence_sum
from mcore_rl.algo.values import value_loss
from mcore_rl.config import AlgorithmConfig, CriticConfig
from mcore_rl.process.errors import describe_error
from mcore_rl.types import TrainBatch

_NO_RANKS = "process group has not been initialized"
"""torch.distributed says so where there are no ranks."""


class TokenLoss(Protocol):
    def __call__(
        self,
        logprobs_T: Tensor,
        entropy_T: Tensor,
        batch: TrainBatch,
        sums: SequenceSum | None = None,
        /,
    ) -> tuple[Tensor, Metrics]:
        """Return (loss_T, metrics_T).

        Pass `sums` if tokens of the batch's samples lie in other micro-batches or on other ranks.

        loss_T is not weighted: the loss of the step is sum(batch.loss_weights_T * loss_T).
        metrics_T are detached token values, which the caller averages over the loss mask of the
        step; it takes the maximum of those named *_max.
        """
        ...


class ValueLoss(Protocol):
    def __call__(self, values_T: Tensor, batch: TrainBatch, /) -> tuple[Tensor, Metrics]:
        """Return (loss_T, metrics_T), as a TokenLoss does."""
        ...


def make_policy_loss(config: AlgorithmConfig) -> TokenLoss:
    """Return the loss of `config`, picklable; the text of a user's file travels with it.

    Raises ValueError naming the option if a name is unknown, or if the loss refuses its options or
    two tokens that it is tried on.
    """
    user_file = user_file_of(config)
    make = loss_of(config, user_file)
    try:
        loss = make(config)
    except ValueError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ValueError(
            f"algorithm.loss={config.loss}: {describe_error(error)}; a loss is registered"
            " as a function that takes the options of algorithm and returns the loss"
        ) from error
    if not callable(loss):
        raise ValueError(
            f"algorithm.loss={config.loss}: made {loss!r:.100} from the options of algorithm, not"
            " a function"
        )
    _try_out(loss, config)
    _ = PAIR_LOSSES[config.preference.loss]
    _ = KL_ESTIMATORS[config.kl.estimator]
    _ = AGGREGATIONS[config.aggregation]
    return partial(policy_loss, config=config, user_file=user_file)


def _try_out(loss: PolicyLoss, config: AlgorithmConfig) -> None:
    """Run the loss on two tokens, as a rank without any samples does.

    A loss that asks for ranks cannot be tried, since there are none yet. Its breakpoints wait for
    the ranks, too.
    """
    logprobs_T = torch.zeros(2, requires_grad=True)
    is_token_T = torch.ones(2, dtype=torch.bool)
    tokens = LossTokens(
        logprobs_T=logprobs_T,
        log_ratio_T=logprobs_T - logprobs_T.detach(),
        advantages_T=torch.ones(2),
        **_over_samples(config, Sequences(sequence_sum([2], is_token_T.device), is_token_T)),
        held_back_T=is_token_T,
    )
    hook = sys.breakpointhook
    sys.breakpointhook = lambda *args, **options: None
    try:
        loss(tokens)
    except Exception as error:  # the user's code may raise anything
        if _NO_RANKS in str(error):
            return
        raise ValueError(
            f"algorithm.loss={config.loss}, tried on two tokens: {describe_error(error)}"
        ) from error
    finally:
        sys.breakpointhook = hook


def make_value_loss(config: CriticConfig) -> ValueLoss:
    """Return the critic's loss, picklable."""
    return partial(value_loss, clip=config.value_clip)


def policy_loss(
    logprobs_T: Tensor,
    entropy_T: Tensor,
    batch: TrainBatch,
    sums: SequenceSum | None = None,
    *,
    config: AlgorithmConfig,
    user_file: UserFile | None = None,
) -> tuple[Tensor, Metrics]:
    """Return (policy loss + kl.coef * KL(policy || reference) - entropy_coef * entropy, metrics_T).

    A batch without log-probs of an old policy is on policy: the detached log-probs serve as the old
    ones. Tokens off the loss mask do not affect loss, gradient or metrics.
    """
    if batch.advantages_T is None:
        raise ValueError("policy_loss needs batch.advantages_T")
    loss = loss_of(config, user_file)(config)
    mask_T = batch.loss_mask_T
    sums = sums or sequence_sum(batch.lens_N, mask_T.device, sample_N=batch.sample_N)
    sequences = Sequences(sums, mask_T)
    own_logprobs_T = logprobs_T.detach() if batch.old_logprobs_T is None else batch.old_logprobs_T
    old_logprobs_T = old_policy(batch, config)
    if old_logprobs_T is None:
        old_logprobs_T = logprobs_T.detach()
    tokens = LossTokens(
        logprobs_T=torch.where(mask_T, logprobs_T, 0.0),
        log_ratio_T=log_ratio(logprobs_T, old_logprobs_T, mask_T),
        advantages_T=batch.advantages_T.masked_fill(~mask_T, 0.0),
        **_over_samples(config, sequences),
        held_back_T=batch.held_back_T,
    )
    entropy_T = torch.where(mask_T, entropy_T, 0.0)
    loss_T, metrics = loss(tokens)
    metrics = metrics | {"loss/policy": loss_T.detach(), "loss/entropy": entropy_T.detach()}
    metrics |= policy_drift(tokens.log_ratio_T)
    if batch.rollout_logprobs_T is not None:
        clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
        metrics |= logprob_diff(own_logprobs_T, batch.rollout_logprobs_T, mask_T, **clip)
    if config.correction.is_weighted or config.correction.reject != "none":
        weights_T, corrected = _correction(own_logprobs_T, batch, sequences, config)
        loss_T = loss_T * weights_T
        metrics |= corrected
    loss_T = loss_T + _kl_loss(logprobs_T, batch, config, metrics)
    if config.entropy_coef:
        loss_T = loss_T - config.entropy_coef * entropy_T
    return loss_T, metrics


def _over_samples(
    config: AlgorithmConfig, sequences: Sequences
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return LossTokens.sequence_mean and sequence_sum, which raise ValueError where the loss did
    not ask for them: sums over samples may take a forward pass, so they must be known of before a
    step.
    """
    functions = {"sequence_mean": sequences.mean, "sequence_sum": sequences.sum}
    if losses.needs(config.loss).whole_samples:
        return functions

    def refuse(values_T: Tensor, name: str) -> Tensor:
        raise ValueError(
            f"algorithm.loss={config.loss} calls LossTokens.{name}, but did not say that it"
            f" needs whole samples: register it as losses.register({config.loss!r},"
            " Needs(whole_samples=True))"
        )

    return {name: partial(refuse, name=name) for name in functions}


def _correction(
    own_logprobs_T: Tensor, batch: TrainBatch, sequences: Sequences, config: AlgorithmConfig
) -> tuple[Tensor, Metrics]:
    """Return (weights_T, metrics_T) that correct for the engine's own probabilities."""
    if batch.rollout_logprobs_T is None:
        raise ValueError("algorithm.correction needs batch.rollout_logprobs_T")
    log_ratio_T = log_ratio(own_logprobs_T, batch.rollout_logprobs_T, batch.loss_mask_T)
    return correction_weights(log_ratio_T, sequences, config.correction)


def _kl_loss(
    logprobs_T: Tensor, batch: TrainBatch, config: AlgorithmConfig, metrics: Metrics
) -> Tensor | float:
    """Return kl.coef * KL(policy || reference), 0 if the KL is part of the reward; add kl/ref to
    `metrics`.
    """
    if batch.ref_logprobs_T is None:
        if config.kl.coef:
            raise ValueError(f"algorithm.kl.coef={config.kl.coef} needs batch.ref_logprobs_T")
        return 0.0
    estimate = KL_ESTIMATORS[config.kl.estimator]
    kl_T = estimate(log_ratio(logprobs_T, batch.ref_logprobs_T, batch.loss_mask_T))
    metrics["kl/ref"] = kl_T.detach()
    return 0.0 if config.kl.in_reward else config.kl.coef * kl_T


def sft_loss(
    logprobs_T: Tensor, entropy_T: Tensor, batch: TrainBatch, sums: SequenceSum | None = None
) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the tokens on the loss mask."""
    loss_T = -torch.where(batch.loss_mask_T, logprobs_T, 0.0)
    entropy_T = torch.where(batch.loss_mask_T, entropy_T, 0.0).detach()
    return loss_T, {"loss/nll": loss_T.detach(), "loss/entropy": entropy_T}
