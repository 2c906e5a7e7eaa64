"""Turns the seconds of an optimizer step into tokens and operations per second of each rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.weights.hf.flops import ModelFlops


@dataclass(frozen=True)
class TrainSpeed:
    """Computes the speed at which the ranks of a model train.

    peak_flops   the peak operations per second of a rank's GPU in bfloat16; None if it is unknown,
                 as on a CPU
    """

    flops: ModelFlops
    num_ranks: int
    peak_flops: float | None

    def metrics(
        self, lens_N: Sequence[int], seconds: float, tower_tflop: float = 0.0
    ) -> dict[str, float]:
        """Return the metrics of a step over sequences of these lengths.

        tower_tflop   operations of a vision tower in the step, 10**12
        """
        operations = self.flops.count_training(lens_N) + 1e12 * tower_tflop
        flops = operations / (seconds * self.num_ranks)
        metrics = {
            "train/tokens_per_second_per_gpu": sum(lens_N) / (seconds * self.num_ranks),
            "train/tflops_per_gpu": flops / 1e12,
        }
        if self.peak_flops is not None:
            metrics["train/mfu"] = flops / self.peak_flops
        return metrics
