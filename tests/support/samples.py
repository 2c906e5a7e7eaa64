"""Samples for tests that log some."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_rl.logs.logger import MetricsLogger
from mcore_rl.types import Prompt, Sample, StoredSample, VersionSpan, WeightVersion
from mcore_rl.types.scores import Scores
from tests.support.laid_out import refer_to


def make_sample(index: int, text: str) -> Sample:
    messages = ({"role": "user", "content": f"What is {index} + 1?"},)
    prompt = Prompt(index, (1, 2), messages, "unit", str(index + 1))
    return Sample(prompt, 0, (5,), (-0.5,), "stop", (VersionSpan(0, 1, WeightVersion(0)),), text)


class HeldSampleLog(MetricsLogger):
    """A log of samples that this process holds."""

    def __init__(self, run_dir: Path, **options: Any) -> None:
        super().__init__(run_dir, read=self._find, **options)
        self._held: dict[int, Sample] = {}

    def log_held(
        self, step: int, samples: Sequence[Sample], scores: Scores, split: str = "train"
    ) -> None:
        """Do as `log_samples`."""
        rows = refer_to(samples)
        self._held = {id(row): sample for row, sample in zip(rows, samples, strict=True)}
        self.log_samples(step, rows, scores, split)

    def _find(self, samples: Sequence[StoredSample]) -> list[Sample]:
        return [self._held[id(sample)] for sample in samples]
