"""Measures the seconds of each phase of a step, and logs when a phase starts."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mcore_rl.process.clock import now_s

logger = logging.getLogger(__name__)


class PhaseTimer:
    """Adds the time of `with timer("rollout"): ...` to timer.seconds["rollout"].

    The step starts when the timer is made.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.seconds: dict[str, float] = {}
        self._start = now_s()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        logger.info("step %d: %s", self.step, phase)
        start = now_s()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now_s() - start

    def metrics(self, waiting: Sequence[str] = ()) -> dict[str, float]:
        """Return time/<phase> of each phase so far and time/step, in wall seconds.

        `waiting` names phases in which the trainer has no work: their share of the step is
        idle/trainer.
        """
        step_s = now_s() - self._start
        metrics = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        metrics["time/step"] = step_s
        if waiting:
            waiting_s = sum(self.seconds.get(phase, 0.0) for phase in waiting)
            metrics["idle/trainer"] = waiting_s / step_s
        return metrics
