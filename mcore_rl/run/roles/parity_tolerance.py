"""How far log-probs of trainer and engine may differ, learned from syncs known to be right.

    d log p(t) = dz_t - sum over j of p_j dz_j        z: logits, dz: their rounding

So |d log p| of a token is about (1 - p) times the rounding of its logits. Divided by 1 - p,
differences of prompts and of samples, and of sharp and flat policies, are of one size: the rounding
of this model between this trainer and these engines.
"""

import json
import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from mcore_rl.config import ParityCheckConfig
from mcore_rl.process.disk import write_whole
from mcore_rl.weight_sync.controller.linked_engine import VERIFIED_FIRST

_log = logging.getLogger(__name__)

MOST = {"float32": 1e-3, "bfloat16": 0.5, "fp8": 1.0}
"""Rounding of logits in nats (`overall`), by what engines compute in, that is always a fault."""
LEAST = {"float32": 1e-4, "bfloat16": 5e-3, "fp8": 5e-3}
"""Rounding of logits in nats, by what engines compute in, below which nothing is called a fault."""
MIN_TOKENS = 1024
"""Fewer compared tokens say too little to learn from, or to judge by what was learned: in bfloat16,
the sums of 285 tokens of right weights lie between 0.6 and 2.5 times their median, of 1,045 between
0.75 and 1.5.
"""
NUM_LEARNED = 2
"""Measurements before the first warning by them: one of prompts, one of samples."""
NUM_TO_JUDGE = VERIFIED_FIRST
"""Measurements before an engine may fail by them, as many as a run's first syncs bring; until then
their spread is not known."""
MARGIN = 1.5
"""An engine fails by them only if it is also above so many times the largest of them."""
KEPT = 16
"""Newest measurements of which the median counts."""
WARN_SHARE = 0.75
"""A warning comes from this share of parity_check.factor times the median on."""
_PER_LOGIT = "nats of rounding per logit"
_LEAST_DOUBT = 0.01
"""Least 1 - p that a difference is divided by: at p = 1 nothing is left but the cast of log p."""


@dataclass(frozen=True)
class EngineDifference:
    """How the log-probs of trainer and engine differ.

    mean      mean |difference| in nats
    typical   median over tokens of |difference| / (1 - p): shows faults that concern every token
    overall   sum of |differences| / sum of (1 - p), without the sequence that differs most: shows
              large differences of few tokens, too
    """

    mean: float
    typical: float
    overall: float
    num_tokens: int

    @staticmethod
    def measure(
        expected: Sequence[Tensor], answer: Sequence[Sequence[float]], is_compared: Sequence[Tensor]
    ) -> "EngineDifference":
        """Compare the trainer's log-probs with an engine's, by sequence; masks say which count."""
        parts = [
            (want.double()[mask], torch.tensor(got, dtype=torch.float64)[mask])
            for want, got, mask in zip(expected, answer, is_compared, strict=True)
            if mask.any()
        ]
        if not parts:
            return EngineDifference(0.0, 0.0, 0.0, 0)
        want_T = torch.cat([want for want, _ in parts])
        difference_T = (want_T - torch.cat([got for _, got in parts])).abs()
        doubt_T = (1 - want_T.exp()).clamp(min=_LEAST_DOUBT)
        lens = [len(want) for want, _ in parts]
        return EngineDifference(
            mean=float(difference_T.mean()),
            typical=float((difference_T / doubt_T).median()),
            overall=_divide_without_worst(difference_T.split(lens), doubt_T.split(lens)),
            num_tokens=len(want_T),
        )


def _divide_without_worst(differences: Sequence[Tensor], doubts: Sequence[Tensor]) -> float:
    """Return the sum of differences over that of doubts, without the sequence that differs most.

    Each sequence has a token; one that is alone counts.

    Rounding alone sends a token to another expert where two are almost equally good; it and those
    behind it then differ by as much as with a wrong weight: of 500 sequences of a small model whose
    nearest tie was turned, one moved by 0.1 nats in all. That is rare enough in float32 not to
    happen to two sequences at once.
    """
    sums_N = torch.stack([each.sum() for each in differences])
    counts_N = torch.ones(len(sums_N), dtype=torch.bool)
    if len(sums_N) > 1 and sums_N.isfinite().all():
        counts_N[sums_N.argmax()] = False
    doubts_N = torch.stack([each.sum() for each in doubts])
    return float(sums_N[counts_N].sum() / doubts_N[counts_N].sum())


class ParityTolerance:
    """Judges the differences between trainer and engines.

    By hand (parity_check.tolerance), the tolerance is the mean in nats. Otherwise `overall` may be
    at most MOST, and `typical` and `overall` are compared with what was measured in syncs whose
    weights were read back. What is much more than their median is warned of. From NUM_TO_JUDGE
    measurements on, it is a fault if it is much more than the largest of them, too: see `limits`.
    """

    def __init__(
        self,
        config: ParityCheckConfig,
        precision: str,
        file: Path | None = None,
        made_by: Mapping[str, object] | None = None,
    ) -> None:
        """Learn anew, or go on with what `file` holds of a run `made_by` the same model.

        precision   what engines compute in: model.dtype, or fp8
        file        where measurements are kept for a run that continues; None: nowhere
        made_by     what the rounding depends on; measurements made by something else are ignored
        """
        self._config = config
        self._precision = precision
        self._file = file
        self._made_by = dict(made_by or {})
        self._learned: deque[tuple[float, float]] = deque(self._read(), KEPT)

    def find_fault(self, difference: EngineDifference) -> str | None:
        """Return how the difference exceeds the tolerance; None if it does not.

        Logs a warning if it is close.
        """
        by_hand = self._config.tolerance
        if by_hand is not None:
            return _exceeds(difference.mean, by_hand, "nats on average", "parity_check.tolerance")
        fault = _exceeds(
            difference.overall,
            MOST[self._precision],
            f"{_PER_LOGIT} (overall)",
            f"the most for engines in {self._precision} unless parity_check.tolerance is set",
        )
        return fault or self._compare_with_usual(difference)

    def _compare_with_usual(self, difference: EngineDifference) -> str | None:
        """Return how the difference is unlike what was learned; log a warning if it is nearly."""
        for name, value in (("typical", difference.typical), ("overall", difference.overall)):
            what = f"{_PER_LOGIT} ({name})"
            if math.isnan(value):
                return f"nan {what}"
            usual = self._usual.get(name)
            if usual is None or difference.num_tokens < MIN_TOKENS:
                continue
            why = (
                f"parity_check.factor={self._config.factor} times {usual:.2e}, which is usual in"
                f" this run, and {MARGIN} times the largest that was right; parity_check.tolerance"
                " sets a bound by hand"
            )
            _, limit = self.limits.get(name, (usual, math.inf))
            fault = _exceeds(value, limit, what, why)
            if fault is not None:
                return fault
            if value > WARN_SHARE * self._much(usual):
                _log.warning(
                    "log-probs of trainer and engine differ by %.2e %s; %.2e is usual in this run",
                    *(value, what, usual),
                )
        return None

    def learn(self, differences: Sequence[EngineDifference]) -> None:
        """Take in the differences of engines whose parameters were read back and are right."""
        enough = [each for each in differences if each.num_tokens >= MIN_TOKENS]
        if self._config.tolerance is not None or not enough:
            return
        typical = median(each.typical for each in enough)
        self._learned.append((typical, median(each.overall for each in enough)))
        if self._file is not None:
            kept = {"made_by": self._made_by, "learned": list(self._learned)}
            write_whole(self._file, json.dumps(kept))

    @property
    def limits(self) -> dict[str, tuple[float, float]]:
        """By kind of difference: (the usual one, the tolerance); empty until enough is learned.

        The tolerance is parity_check.factor times the median and MARGIN times the largest
        measurement, whichever is more.
        """
        if len(self._learned) < NUM_TO_JUDGE:
            return {}
        largest = (max(values) for values in zip(*self._learned, strict=True))
        return {
            name: (usual, max(self._much(usual), MARGIN * most))
            for (name, usual), most in zip(self._usual.items(), largest, strict=True)
        }

    @property
    def _usual(self) -> dict[str, float]:
        """By kind of difference, the median of what was learned; empty until that means much."""
        if len(self._learned) < NUM_LEARNED:
            return {}
        medians = (median(values) for values in zip(*self._learned, strict=True))
        return dict(zip(("typical", "overall"), medians, strict=True))

    def _much(self, usual: float) -> float:
        """Return what is much more than usual, in nats."""
        return max(LEAST[self._precision], self._config.factor * usual)

    def _read(self) -> list[tuple[float, float]]:
        if self._file is None or not self._file.exists():
            return []
        kept = json.loads(self._file.read_text())
        if kept["made_by"] != self._made_by:
            _log.info("%s is of another model or other engines: learned anew", self._file)
            return []
        return [(typical, overall) for typical, overall in kept["learned"]]


def _exceeds(value: float, limit: float, what: str, why: str) -> str | None:
    """Return the fault of a value above its limit; a NaN is above every limit."""
    if value <= limit:
        return None
    return f"{value:.2e} {what}, more than {limit:.3g} ({why})"
