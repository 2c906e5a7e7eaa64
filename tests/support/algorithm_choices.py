"""Recipes in which each entry of the registries of algorithms occurs."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any, cast

from mcore_rl.algo.aggregation import AGGREGATIONS
from mcore_rl.algo.correction import REJECTIONS, WEIGHTS
from mcore_rl.algo.kl import KL_ESTIMATORS
from mcore_rl.algo.lookup import losses
from mcore_rl.config import AlgorithmConfig, CorrectionConfig, KLConfig

REJECT_ABOVE = {
    "none": 0.0,
    "token": 0.03,
    "sequence": 0.022,
    "sequence_sum": 0.2,
    "sequence_max": 0.04,
}


def choices() -> list[AlgorithmConfig]:
    """Return recipes in which each entry of the registries occurs.

    Every loss has no correction, and one of the KL estimators and aggregations in turn. Every
    weight and rejection of a correction occurs with a loss of tokens and with one of samples.
    """
    base = AlgorithmConfig(clip_low=0.1, clip_high=0.15, tau_positive=1.2, tau_negative=1.7)
    kls = [KLConfig(0.1, cast(Any, name)) for name in KL_ESTIMATORS.names]
    recipes = [
        replace(base, loss=loss, kl=kl, aggregation=aggregation)
        for loss, kl, aggregation in zip_cycled(losses.names, kls, AGGREGATIONS.names)
    ]
    estimators = ("k1", "k2", "k3")
    normalize = (True, False, True)
    for weight, reject, estimator, is_normalized in zip_cycled(
        WEIGHTS.names, REJECTIONS.names, estimators, normalize
    ):
        correction = CorrectionConfig(
            weight=weight,
            low=0.3,
            high=1.3,
            normalize=is_normalized,
            reject=reject,
            reject_estimator=estimator,
            reject_above=REJECT_ABOVE[reject],
        )
        recipes += [replace(base, loss=x, correction=correction) for x in ("ppo_clip", "gspo")]
    return recipes


def zip_cycled(*lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return as many tuples as the longest list has items; the others begin anew."""
    return list(islice(zip(*map(cycle, lists), strict=False), max(map(len, lists))))
