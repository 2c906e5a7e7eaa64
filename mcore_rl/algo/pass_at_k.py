"""Estimates pass@k from counts of right answers."""

from math import comb


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that k of n samples, c of them right, include a right
    one.

    Unbiased; Chen et al., arXiv:2107.03374, eq. 1. Raises ValueError unless 0 <= c <= n and 1 <= k
    <= n.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(
            f"pass@{k} of {num_samples} samples, {num_correct} correct: need 0 <= c <= n, 1 <= k"
            " <= n"
        )
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)
