"""After a weight sync a few sequences are scored by trainer and engine; who disagrees is named."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mcore_rl.config import CanaryConfig
from mcore_rl.data.batch import select, split_by_lens
from mcore_rl.roles import Trainer
from mcore_rl.rollout.client import RolloutError
from mcore_rl.rollout.scoring import score_sequences
from mcore_rl.types import LogprobOptions, TrainBatch, WeightVersion

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean |difference| in nats, by model dtype, that different kernels on the same weights stay below."""


@dataclass(frozen=True)
class CanaryReport:
    """Mean |trainer - engine| in nats by engine url; why an engine failed, by url."""

    differences: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        return {"sync/canary_diff": max(self.differences.values())} if self.differences else {}


class Canary:
    """Compares what engines make of a few sequences with what the trainer's current weights make of them."""

    def __init__(
        self,
        trainer: Trainer,
        config: CanaryConfig,
        dtype: str,
        timeout_s: float,
        watched: Callable[[Coroutine[Any, Any, Any]], Any],
        ready: Callable[[], Awaitable[None]],
    ) -> None:
        """`ready`: awaited once the trainer has scored, before the engines do."""
        self._ready = ready
        self._trainer, self._config, self._watched = trainer, config, watched
        self._tolerance = TOLERANCE[dtype] if config.tolerance is None else config.tolerance
        self._timeout_s = timeout_s

    def check(self, version: WeightVersion, batch: TrainBatch, urls: Sequence[str]) -> CanaryReport:
        """Score the first sequences of `batch` on the engines at `urls`, which should serve `version`."""
        num_sequences = min(self._config.sequences, len(batch.lens_N))
        if not num_sequences:
            return CanaryReport()
        probe = replace(select(batch, range(num_sequences)), routed_experts_TLK=None)
        trainer_T = self._trainer.compute_logprobs(
            probe, LogprobOptions(temperature=1.0)
        ).logprobs_T
        expected = [part[1:] for part in split_by_lens(trainer_T, probe.lens_N)]
        sequences = [part.tolist() for part in split_by_lens(probe.token_ids_T, probe.lens_N)]
        answers = self._watched(self._score(urls, sequences))
        report = CanaryReport()
        for url, answer in zip(urls, answers, strict=True):
            if isinstance(answer, RolloutError):
                report.failed[url] = str(answer)
                continue
            report.differences[url] = difference = _mean_difference(expected, answer)
            if not difference <= self._tolerance:
                report.failed[url] = (
                    f"engine {url} claims weights {version}, but its log-probs of {num_sequences} sequences"
                    f" differ from the trainer's by {difference:.2e} nats on average, more than"
                    f" {self._tolerance} (canary.tolerance)"
                )
        return report

    async def _score(self, urls: Sequence[str], sequences: Sequence[Sequence[int]]) -> list[Any]:
        await self._ready()
        calls = (score_sequences(url, sequences, self._timeout_s) for url in urls)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, RolloutError):
                raise result
        return results


def _mean_difference(expected: Sequence[Tensor], answer: Sequence[Sequence[float]]) -> float:
    differences = [
        (want - torch.tensor(got, dtype=want.dtype)).abs()
        for want, got in zip(expected, answer, strict=True)
    ]
    return torch.cat(differences).mean().item()
