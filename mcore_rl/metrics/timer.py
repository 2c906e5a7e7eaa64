"""Seconds of each phase of a step; the beginning of each phase is told to the log."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class PhaseTimer:
    """`with timer("rollout"): ...` adds to timer.seconds["rollout"]; making the timer starts the step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        logger.info("step %d: %s", self.step, phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self, waiting: Sequence[str] = ()) -> dict[str, float]:
        """time/<phase> of each phase so far and time/step, wall seconds since the timer was made; with phases
        in which the trainer is `waiting`, their share of the step as idle/trainer.
        """
        whole = time.perf_counter() - self._start
        metrics = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()} | {
            "time/step": whole
        }
        if waiting:
            metrics["idle/trainer"] = sum(self.seconds.get(phase, 0.0) for phase in waiting) / whole
        return metrics
