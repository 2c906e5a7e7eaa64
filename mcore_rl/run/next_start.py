"""Says where a training command begins, and what the same command will do after its end.

checkpoints --> "goes on after step 4 of 60"     the newest whole one
            --> "starts anew"                    there is none, or run.resume=false
"""

from collections.abc import Iterator
from contextlib import contextmanager

from mcore_rl.config import Config
from mcore_rl.logs.progress import say
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.planning.bundles import RunSize
from mcore_rl.process.signals import StoppedEarlyError
from mcore_rl.run.kept_start import Origin


def find_last_step(config: Config, command: str) -> int:
    """Return the last step of a training command; 0 for a command that trains nothing."""
    steps = {"train": config.run.steps, "sft": config.sft.steps, "dpo": config.dpo.steps}
    return steps.get(command, 0)


def tell_if_finished(config: Config, command: str) -> bool:
    """Return whether an earlier command did all that this one asks for; print so then."""
    finished_step = RunFolder(config.run.dir).read_finished_step()
    if not finished_step:
        return False
    folder = RunFolder(config.run.dir, has_critic=RunSize.make(config, command).critic > 0)
    last_step = find_last_step(config, command)
    step = min(finished_step, newest_step(folder))
    is_exported = folder.export.exists() or not config.checkpoint.export_hf
    if not config.run.resume or step < last_step or not is_exported:
        return False
    option = "run.steps" if command == "train" else f"{command}.steps"
    print(
        f"{folder.path} is complete at step {step}: to go on, give a {option} above {last_step}; to"
        " start anew, give another run.dir or run.resume=false"
    )
    return True


def tell_start(folder: RunFolder, origin: Origin, last_step: int) -> None:
    """Print after which step the command goes on, and which checkpoints it ignores, if any."""
    if origin.held is not None:
        say(f"goes on after step {origin.held['step']} of {last_step}, which is in memory")
        return
    step = newest_step(folder)
    ignored = folder.list_incomplete(after=step)
    names = f"; ignored, as their write was not completed: {', '.join(ignored)}" if ignored else ""
    if origin.newest is not None:
        say(f"goes on after step {step} of {last_step}{names}")
    elif ignored:
        say(f"starts anew, as no checkpoint is complete{names}")


@contextmanager
def tell_next_start(folder: RunFolder, last_step: int, resume: bool) -> Iterator[None]:
    """Note that the command is finished if the block ends without an error; else say what is next.

    An error gets the text as a note, which is printed after the error. Wrong input gets none: the
    same command would be refused again.
    """
    try:
        yield
    except (ValueError, StoppedEarlyError):
        raise
    except SystemExit:
        print(describe_next_start(folder, last_step, resume), flush=True)
        raise
    except BaseException as error:
        error.add_note(describe_next_start(folder, last_step, resume))
        raise
    folder.note_finished(last_step)
    say(f"complete after step {last_step}: the same command has nothing left to do")


def describe_next_start(folder: RunFolder, last_step: int, resume: bool) -> str:
    """Return what the same command does next, and which checkpoint that was begun is lost."""
    step = newest_step(folder)
    lost = [begun for begun in folder.begun_steps if not folder.is_saved(begun) and begun > step]
    dropped = f"; the checkpoint of step {lost[-1]} was not completed" if lost else ""
    on = f"goes on after step {step} of {last_step}"
    if step and not resume:
        return f"the same command starts anew; without run.resume=false it {on}{dropped}"
    if step:
        return f"the same command {on}{dropped}"
    return f"the same command starts anew, as no checkpoint is complete{dropped}"


def newest_step(folder: RunFolder) -> int:
    """Return the step of the newest checkpoint that is complete; 0: there is none."""
    return max(folder.complete_steps(), default=0)
