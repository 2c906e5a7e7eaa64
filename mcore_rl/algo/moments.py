"""Mean and variance of a step's numbers, joined from those of its parts.

Axes: V numbers, of tokens or of samples.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

VARIANCE_EPS = 1e-8
"""Added to the variance that numbers are divided by."""


@dataclass(frozen=True)
class Moments:
    """Mean and spread of numbers; equal numbers have exactly the variance 0, in any parts.

    num       how many there are, or the sum of their weights
    lowest    the least of them
    above     their mean minus `lowest`
    squares   sum of their squared distances from the mean
    """

    num: float = 0.0
    lowest: float = math.inf
    above: float = 0.0
    squares: float = 0.0

    @staticmethod
    def from_values(values_V: Tensor, weights_V: Tensor | None = None) -> "Moments":
        """Return the moments of float64 numbers; each counts as often as its weight says."""
        if weights_V is not None:
            values_V, weights_V = values_V[weights_V > 0], weights_V[weights_V > 0]
        if not len(values_V):
            return Moments()
        num = float(len(values_V) if weights_V is None else weights_V.sum())
        lowest = float(values_V.amin())
        apart_V = values_V - lowest
        above = float((apart_V if weights_V is None else weights_V * apart_V).sum()) / num
        apart_V.sub_(above).square_()
        squares = float((apart_V if weights_V is None else weights_V * apart_V).sum())
        return Moments(num, lowest, above, squares)

    def join(self, other: "Moments") -> "Moments":
        """Return the moments of the numbers of both.

        Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample
        variances, 1979, eq. 2.1.
        """
        if not self.num or not other.num:
            return self if self.num else other
        num = self.num + other.num
        lowest = min(self.lowest, other.lowest)
        above = self.above + (self.lowest - lowest)
        apart = other.above + (other.lowest - lowest) - above
        squares = self.squares + other.squares + apart**2 * self.num * other.num / num
        return Moments(num, lowest, above + apart * other.num / num, squares)

    @property
    def mean(self) -> float:
        return self.lowest + self.above if self.num else 0.0

    @property
    def variance(self) -> float:
        """Divided by num - 1; 0 of a single number."""
        return self.squares / max(self.num - 1, 1.0)


def join_moments(parts: Iterable[Moments]) -> Moments:
    """Return the moments of the numbers of all parts."""
    return reduce(Moments.join, parts, Moments())


def standardize(values_V: Tensor, moments: Moments) -> Tensor:
    """Return (x - mean) / sqrt(var + 1e-8) of numbers with these moments, or of some of them."""
    if not moments.num:
        return torch.zeros_like(values_V)
    scale = math.sqrt(moments.variance + VARIANCE_EPS)
    return (values_V - moments.lowest).sub_(moments.above).div_(scale)
