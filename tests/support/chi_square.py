"""How likely counts are, if things are drawn with given probabilities."""

import torch
from torch import Tensor

NUM_BINS = 50


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


def fit_of_draws(logprobs_TV: Tensor, token_T: Tensor) -> float:
    """Return a p-value of tokens, if each is drawn with its row of float64 log-probs.

    Where a token's share of its row begins, plus a random part of the share, is then as likely in
    each fiftieth of 0 to 1.
    """
    probs_TV = logprobs_TV.exp()
    own_T = probs_TV.gather(1, token_T[:, None])[:, 0]
    place_T = probs_TV.cumsum(1).gather(1, token_T[:, None])[:, 0]
    place_T -= own_T * torch.rand(len(token_T), dtype=torch.float64)
    bin_T = (place_T * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    counts = torch.bincount(bin_T, minlength=NUM_BINS)
    return chi_square(counts, torch.full((NUM_BINS,), 1 / NUM_BINS))
