"""Keeps what the loop logs of a simulated run, and which prompts each step trained on."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from mcore_rl.loops.roles import Samples
from mcore_rl.types.scores import Scores


class StepLog:
    """Plays roles.Log."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self._prompts: dict[int, Counter[int]] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            self.steps.setdefault(step, {}).update(metrics)

    def log_samples(
        self, step: int, samples: Samples, scores: Scores, split: str = "train"
    ) -> None:
        if split == "train":
            self._prompts[step] = Counter(sample.prompt.index for sample in samples)

    def go_back(self, step: int) -> None:
        """Forget the steps after `step`, which the run has to repeat."""
        for later in [number for number in self.steps if number > step]:
            del self.steps[later]
            self._prompts.pop(later, None)

    def unaccounted(self, stream: Mapping[str, Any], num_samples: int) -> list[int]:
        """Return prompts that were not trained on, with all their `num_samples` samples, as often
        as they were handed out, apart from those that are still open.

        `stream` is the state of the prompts' stream, which is not shuffled.
        """
        trained = sum(self._prompts.values(), Counter[int]())
        still_open = set(stream["open"])
        wanted: Counter[int] = Counter()
        for position in range(stream["position"]):
            wanted[position % stream["num_items"]] += num_samples * (position not in still_open)
        return [prompt for prompt, num in wanted.items() if trained[prompt] != num]
