"""Run folders with as many samples as wanted, written by the real log."""

from pathlib import Path

from mcore_rl.types import Prompt, Sample, VersionSpan, WeightVersion
from mcore_rl.types.scores import Scores
from tests.support.samples import HeldSampleLog

PER_STEP = 64


def write_many_samples(run_dir: Path, num_samples: int) -> None:
    """Write samples of steps 1, 2, ..., each with half of the rewards 1, and metrics."""
    with HeldSampleLog(run_dir, console=False, rotate_bytes=16 << 20) as log:
        for first in range(0, num_samples, PER_STEP):
            step = first // PER_STEP + 1
            numbers = range(first, min(first + PER_STEP, num_samples))
            samples = [_make_sample(number) for number in numbers]
            rewards = [float(number % 2) for number in numbers]
            log.log(step, {"reward/mean": sum(rewards) / len(rewards), "time/step": 1.0})
            log.log_held(step, samples, Scores(rewards))


def _make_sample(number: int) -> Sample:
    question = f"There are {number} apples in the box. Ada takes out 9. How many are left? " * 3
    prompt = Prompt(number // 8, (1, 2), ({"role": "user", "content": question},), "unit", "9")
    text = f"needle {number} is in this hay: " + "one two three four five six. " * 12
    versions = (VersionSpan(0, 4, WeightVersion(number // PER_STEP)),)
    return Sample(prompt, number % 8, (5, 6, 7, 8), (-0.5,) * 4, "stop", versions, text)
