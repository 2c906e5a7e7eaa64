"""Goes on without checkpoints whose files cannot be written (checkpoint.on_error=continue).

ranks: disk full, read-only, failing --> (folder, reason) --> the console, the log, a metric
"""

import logging

from mcore_rl.config import CheckpointConfig
from mcore_rl.logs.kept_checkpoints import prune_checkpoints
from mcore_rl.logs.progress import say
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.process.disk import UnwritableError
from mcore_rl.types import FailedSaves

FAILED = "checkpoint/failed"
_log = logging.getLogger(__name__)


def note_failed_saves(folder: RunFolder, failed: FailedSaves | None) -> None:
    """Tell, once each, which checkpoints are lost and why."""
    for path, reason in failed or ():
        step = int(path.rpartition("_")[2])
        if step in folder.failed_saves:
            continue
        folder.failed_saves[step] = reason
        _tell(
            f"the checkpoint of step {step} is lost, and the run goes on"
            f" (checkpoint.on_error=continue): {reason}. {_name_newest(folder)}"
        )


def count_failed_saves(folder: RunFolder) -> float:
    """Return how many saves have failed since the newest checkpoint that counts."""
    if not folder.failed_saves:
        return 0.0
    newest = max(folder.complete_steps(), default=0)
    return float(sum(step > newest for step in folder.failed_saves))


def prune_if_possible(folder: RunFolder, options: CheckpointConfig) -> None:
    """Delete checkpoints that are not kept; with on_error=continue, tell why if that fails."""
    try:
        prune_checkpoints(folder, options)
    except (OSError, UnwritableError) as error:
        if options.on_error == "end":
            raise
        _tell(f"old checkpoints are not deleted, and the run goes on: {error}")


def set_aside_if_possible(folder: RunFolder, step: int, options: CheckpointConfig) -> None:
    """Set earlier parts of a checkpoint aside; with on_error=continue, tell why if that fails."""
    try:
        folder.set_aside(step)
    except OSError as error:
        if options.on_error == "end":
            raise
        _tell(f"parts of an earlier checkpoint of step {step} are in the way: {error}")


def refuse_lost_end(folder: RunFolder) -> None:
    """Raise UnwritableError if the last checkpoint that was begun is lost."""
    step = folder.begun_steps[-1] if folder.begun_steps else 0
    if step in folder.failed_saves and not folder.is_saved(step):
        raise UnwritableError(
            f"the last checkpoint, of step {step}, is lost: {folder.failed_saves[step]}."
            f" {_name_newest(folder)}"
        )


def _name_newest(folder: RunFolder) -> str:
    newest = max(folder.complete_steps(), default=0)
    return f"The newest checkpoint is that of step {newest}" if newest else "There is no other one"


def _tell(text: str) -> None:
    _log.warning(text)
    say(text)
