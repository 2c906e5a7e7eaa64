"""Says after which steps a loop saves, and ends a run that was asked to stop."""

from collections.abc import Callable

from mcore_rl.process.signals import StoppedEarlyError, is_stop_requested


def is_due(step: int, every_steps: int, last_step: int) -> bool:
    """Return whether `step` is the last step or a multiple of `every_steps` (0: no multiple is
    due).
    """
    return step == last_step or (every_steps > 0 and step % every_steps == 0)


def save_if_due(step: int, every_steps: int, last_step: int, save: Callable[[], None]) -> None:
    """Call `save` if the step is due, or if the run was asked to stop.

    Raises StoppedEarlyError in the second case, once the step is saved.
    """
    is_stopping = is_stop_requested()
    if is_stopping or is_due(step, every_steps, last_step):
        save()
    if is_stopping and step < last_step:
        raise StoppedEarlyError(
            f"stopped on request after step {step} of {last_step}; the same command continues there"
        )
