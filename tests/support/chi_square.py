"""How likely counts are, if things are drawn with given probabilities."""

import torch
from torch import Tensor


def chi_square(counts_V: Tensor, probs_V: Tensor) -> float:
    """Return Pearson's p-value of counts; AssertionError if what is impossible was drawn.

    Things that are expected less than five times are counted together.
    """
    assert not counts_V[probs_V == 0].any(), f"{counts_V} were drawn with {probs_V}"
    expected_V = probs_V.double() / probs_V.double().sum() * counts_V.sum()
    rare_V = expected_V < 5
    counts = torch.cat([counts_V[~rare_V].double(), counts_V[rare_V].double().sum()[None]])
    expected = torch.cat([expected_V[~rare_V], expected_V[rare_V].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    distance = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, distance / 2))
