"""Computes the weight of each token in the loss of one optimizer step, from loss mask and lengths.

Weights are computed once for the whole mini-batch, so that sum(weights_T * loss_T) is the same
however the sequences are cut into micro-batches or spread over ranks.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mcore_rl.algo.registry import Registry

Aggregation = Callable[[Tensor, int | None], Tensor]
"""(trained_N, max_response_len) -> float64 weights_N, or one weight for all sequences.

trained_N   int64, trained tokens of each sequence
"""

AGGREGATIONS: Registry[Aggregation] = Registry("algorithm.aggregation")


def loss_weights(
    kind: str,
    loss_mask_T: Tensor,
    lens_N: Sequence[int],
    max_response_len: int | None = None,
    sample_N: Sequence[int] | None = None,
) -> Tensor:
    """Return float32 weights_T, 0 where loss_mask_T is False; all 0 if no token is trained.

    max_response_len   tokens; only kind="constant" uses it
    sample_N           as in `sequence_weights`
    Raises ValueError for an unknown kind, or if lens_N do not sum to the length of the mask.
    """
    if loss_mask_T.shape != (sum(lens_N),):
        raise ValueError(f"loss_mask_T has {tuple(loss_mask_T.shape)}, lens_N sum to {sum(lens_N)}")
    lens = torch.tensor(lens_N, dtype=torch.int64, device=loss_mask_T.device)
    trained_N = torch.segment_reduce(loss_mask_T.double(), "sum", lengths=lens).long()
    of_sample_N = None if sample_N is None else torch.tensor(sample_N, device=lens.device)
    weights_N = sequence_weights(kind, trained_N, max_response_len, of_sample_N)
    return weights_N.repeat_interleave(lens) * loss_mask_T


def sequence_weights(
    kind: str,
    trained_N: Tensor,
    max_response_len: int | None = None,
    sample_N: Tensor | None = None,
) -> Tensor:
    """Return float32 [N], the weight of each trained token of a sequence.

    trained_N          int64, trained tokens of each sequence
    max_response_len   tokens; only kind="constant" uses it
    sample_N           int64, equal for the sequences of one sample: these count as one sequence, so
                       a token's weight does not depend on how an episode is cut into rows
    Raises ValueError for an unknown kind.
    """
    if sample_N is not None:
        _, place_N = sample_N.unique(return_inverse=True)
        num_samples = int(place_N.max()) + 1
        of_samples = trained_N.new_zeros(num_samples).index_add_(0, place_N, trained_N)
        return sequence_weights(kind, of_samples, max_response_len)[place_N]
    weights = AGGREGATIONS[kind](trained_N, max_response_len)
    return weights.expand(len(trained_N)).float()


@AGGREGATIONS.register("token_mean")
def token_mean(trained_N: Tensor, max_response_len: int | None) -> Tensor:
    """1 / (trained tokens of the mini-batch); DAPO, arXiv:2503.14476, section 3.3."""
    return 1 / trained_N.sum().clamp(min=1).double()


@AGGREGATIONS.register("sequence_mean")
def sequence_mean(trained_N: Tensor, max_response_len: int | None) -> Tensor:
    """1 / (N |o_i|): the mean over tokens, then over the N sequences that have trained tokens.

    GRPO, arXiv:2402.03300, eq. 3.
    """
    num_trained = (trained_N > 0).sum().clamp(min=1)
    return 1 / (num_trained * trained_N.double().clamp(min=1))


@AGGREGATIONS.register("constant")
def constant(trained_N: Tensor, max_response_len: int | None) -> Tensor:
    """1 / (N max_response_len), independent of response lengths.

    Dr. GRPO, arXiv:2503.20783, section 3.2.
    """
    if max_response_len is None or max_response_len < 1:
        raise ValueError(
            f"algorithm.aggregation='constant' needs max_response_len >= 1, got {max_response_len}"
        )
    num_sequences = max(len(trained_N), 1)
    return torch.tensor(
        1 / (num_sequences * max_response_len), dtype=torch.float64, device=trained_N.device
    )


@AGGREGATIONS.register("token_sum")
def token_sum(trained_N: Tensor, max_response_len: int | None) -> Tensor:
    """1, for advantages that already contain every denominator."""
    return torch.ones((), dtype=torch.float64, device=trained_N.device)
