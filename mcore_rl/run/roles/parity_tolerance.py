"""Learns from verified weight syncs how far log-probs of trainer and engine may differ.

    d log p(t) = dz_t - sum over j of p_j dz_j        z: logits, dz: their rounding

So |d log p| of a token is about (1 - p) times the rounding of its logits. Divided by 1 - p, the
differences are of one size for prompts and samples, for sharp and flat policies. That size is the
rounding of this model between this trainer and these engines.
"""

import json
import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mcore_rl.config import ModelConfig, ParityCheckConfig, RolloutConfig, TrainConfig
from mcore_rl.process.disk import write_whole
from mcore_rl.process.versions import find_versions
from mcore_rl.weight_sync.controller.linked_engine import VERIFIED_FIRST

_log = logging.getLogger(__name__)

MOST = {"float32": 1e-3, "bfloat16": 0.5, "fp8": 1.0, "int4": 1.0}
"""The engines' dtype -> the largest tolerated rounding of logits in nats (`overall`)."""
LEAST = {"float32": 1e-4, "bfloat16": 5e-3, "fp8": 5e-3, "int4": 5e-3}
"""The engines' dtype -> the rounding of logits in nats that is always tolerated."""
MIN_TOKENS = 1024
"""Differences of fewer compared tokens are neither learned nor judged by learned ones.

In bfloat16 with right weights, sums over 285 tokens lie between 0.6 and 2.5 times their median, and
sums over 1,045 tokens between 0.75 and 1.5 times.
"""
NUM_LEARNED = 2
"""Measurements before the first warning: one of prompts, one of samples."""
NUM_TO_JUDGE = VERIFIED_FIRST
"""Measurements before an engine may fail by them: as many as the first syncs of a run bring. Fewer
measurements do not show their spread."""
MARGIN = 1.5
"""An engine fails only if its difference is also above so many times the largest measurement."""
KEPT = 16
"""Number of newest measurements that are kept."""
WARN_SHARE = 0.75
"""A warning comes above this share of parity_check.factor times the median."""
_PER_LOGIT = "nats of rounding per logit"
_LEAST_DOUBT = 0.01
"""The least divisor 1 - p: at p = 1 only the cast of log p makes a difference."""


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
        """Compare log-probs of trainer and engine, by sequence; masks say which tokens count."""
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
    """Return the sum of differences divided by the sum of doubts.

    The sequence that differs most is left out, unless it is the only one. No sequence is empty.

    Where two experts are almost equally good, rounding alone may send a token to the other expert.
    That token and the tokens behind it then differ by as much as with a wrong weight: in one of 500
    sequences of a small model, log-probs changed by 0.1 nats in all once its closest tie was
    decided otherwise. In float32 this is too rare to happen to two sequences at once.
    """
    sums_N = torch.stack([each.sum() for each in differences])
    counts_N = torch.ones(len(sums_N), dtype=torch.bool)
    if len(sums_N) > 1 and sums_N.isfinite().all():
        counts_N[sums_N.argmax()] = False
    doubts_N = torch.stack([each.sum() for each in doubts])
    return float(sums_N[counts_N].sum() / doubts_N[counts_N].sum())


class ParityTolerance:
    """Judges the differences between trainer and engines.

    With parity_check.tolerance, the mean in nats may be at most that. Otherwise `overall` may be at
    most MOST, and `typical` and `overall` are compared with measurements of syncs whose weights
    were read back: a value far above their median gives a warning. From NUM_TO_JUDGE measurements
    on, a value that is also far above the largest measurement is a fault; see `limits`.
    """

    def __init__(
        self,
        config: ParityCheckConfig,
        precision: str,
        file: Path | None = None,
        made_by: Mapping[str, object] | None = None,
    ) -> None:
        """Read the measurements in `file`, if they were `made_by` the same model and devices.

        precision   what engines hold: model.dtype, fp8 or int4
        file        keeps measurements for a run that continues; None: they are not kept
        made_by     everything that the rounding depends on
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
        """Return how the difference exceeds the learned limits; log a warning if it comes close."""
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
        """Learn from the differences of engines whose parameters were read back and are right."""
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
        """Kind of difference -> (the usual value, the tolerance).

        Empty before NUM_TO_JUDGE measurements.

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
        """Kind of difference -> the median measurement; empty before NUM_LEARNED measurements."""
        if len(self._learned) < NUM_LEARNED:
            return {}
        medians = (median(values) for values in zip(*self._learned, strict=True))
        return dict(zip(("typical", "overall"), medians, strict=True))

    def _much(self, usual: float) -> float:
        """Return the value, in nats, above which a difference is far from usual."""
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


_COMPUTING = ("torch", "sglang", "megatron-core", "transformer-engine")


def describe_kernels(
    model: ModelConfig, rollout: RolloutConfig, train: TrainConfig, devices: Sequence[str]
) -> dict[str, Any]:
    """Return what decides how engines and trainer round; a run that continues with the same knows
    its rounding.

    devices   names of the trainer ranks' GPUs; on others, the same kernels round otherwise
    """
    return {
        "model": model.path,
        "dtype": model.dtype,
        "quantization": rollout.quantization,
        "engine_ranks": rollout.engine_ranks,
        "compiled": rollout.compiled,
        "sglang": {name: str(value) for name, value in sorted(rollout.sglang.items())},
        "megatron": {name: str(value) for name, value in sorted(train.megatron.items())},
        "versions": find_versions(_COMPUTING),
        "devices": list(devices),
    }
