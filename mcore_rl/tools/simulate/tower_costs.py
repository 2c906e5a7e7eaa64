"""Predicts the seconds of a vision tower for the image of a simulated prompt.

The image is the most nearly square one of simulate.image_tokens tokens.
"""

from dataclasses import dataclass

from mcore_rl.config import Config
from mcore_rl.tools.simulate.hardware import GpuRates, ReachedShares
from mcore_rl.weights.hf.facts import ModelFacts
from mcore_rl.weights.hf.tower_flops import TowerFlops


@dataclass(frozen=True)
class TowerCosts:
    """Seconds of one rank for an image; no layout cuts the tower (docs/vision.md).

    forward_s   of a forward pass
    step_s      of forward and backward passes, by train.vision, with what is computed again
    prefill_s   of an engine's ranks, which divide the tower
    """

    forward_s: float
    step_s: float
    prefill_s: float

    @staticmethod
    def of(
        config: Config, facts: ModelFacts, gpu: GpuRates, shares: ReachedShares
    ) -> "TowerCosts | None":
        """Return the costs of a model's tower; None without a tower or without images."""
        flops = TowerFlops.of(facts)
        num_tokens = config.simulate.image_tokens
        if flops is None or not num_tokens:
            return None
        image = [flops.square(num_tokens)]
        train = config.train
        step = flops.training(image, train.vision)
        if train.vision == "all" and train.recompute != "none":
            step += flops.blocks(image)
        per_second = gpu.flops * shares.train
        return TowerCosts(
            flops.forward(image) / per_second,
            step / per_second,
            flops.forward(image) / (gpu.flops * shares.prefill * config.rollout.tp),
        )
