"""Says after which steps a loop saves, and ends a run that was asked to stop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mcore_rl.logs.logger import PhaseTimer
from mcore_rl.loops.roles import Log
from mcore_rl.process.signals import OverdueStopError, StoppedEarlyError, is_stop_requested

Save = Callable[[], None]


def is_due(step: int, every_steps: int, last_step: int) -> bool:
    """Return whether `step` is the last step or a multiple of `every_steps` (0: no multiple is
    due).
    """
    return step == last_step or (every_steps > 0 and step % every_steps == 0)


def save_if_due(step: int, every_steps: int, last_step: int, save: Save) -> bool:
    """Call `save` if the step is due, or if the run was asked to stop; return whether it was.

    Raises StoppedEarlyError in the second case, once the step is saved.
    """
    is_stopping = is_stop_requested()
    is_saved = is_stopping or is_due(step, every_steps, last_step)
    if is_saved:
        save()
    if is_stopping and step < last_step:
        raise _make_stop(step, last_step)
    return is_saved


def save_timed(log: Log, timer: PhaseTimer, save: Save) -> None:
    """Call `save`, and log how long training paused for it: until its state was copied."""
    with timer("checkpoint"):
        save()
    log.log(timer.step, {"time/checkpoint": timer.seconds["checkpoint"]})


@contextmanager
def save_if_overdue(step: int, last_step: int, save: Save | None) -> Iterator[None]:
    """If a request to stop is overdue in the block, end the run after `step`, the one before.

    save   saves `step`, whose state the ranks still have then; None: it was saved, or is the start
    """
    try:
        yield
    except OverdueStopError:
        if save is not None:
            save()
        raise _make_stop(step, last_step) from None


def _make_stop(step: int, last_step: int) -> StoppedEarlyError:
    return StoppedEarlyError(
        f"stopped on request after step {step} of {last_step}; the same command continues there"
    )
