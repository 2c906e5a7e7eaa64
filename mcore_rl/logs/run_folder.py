"""Names the files of a run's folder, holds its lock and finds its newest checkpoint.

run.lock         locked while a command writes here; names the process that did last
run.lease        the same for hosts that do not see one another's locks; its holder renews it
run.token        tells the run apart from others of a cluster whose folders have the same path
logs/            controller.log, one file per rank and per engine
config.yaml      the recipe with all overrides and defaults, without secrets
checkpoints/     step_000010, critic_000010, ...; an incomplete one has another name
hf/, critic_hf/  the exported policy and critic
hf_steps/        exports of earlier steps: step_000010, ...
profile/         captures of steps, if the recipe asks for them
kept_samples/    finished samples that no step had when a checkpoint was saved: step_000010, ...
skipped/         batches of optimizer steps that were left out
finished.json    the last step, once a command did all it had to do
parity_check.json
                 rounding between trainer and engines, as the parity check has learned it
metrics.jsonl, samples.jsonl, episodes.jsonl, alarms.jsonl
ledger.jsonl     what became of each prompt and sample (logs/ledger)
tensorboard/, summary.json, reward_curve.png

A log that reaches log.rotate_mib becomes a segment, such as metrics.000001.jsonl.
"""

import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mcore_rl.process import relaunch
from mcore_rl.process.disk import (
    DELETED,
    explain_loss,
    is_disk_full,
    report_full_disk,
    write_whole,
)
from mcore_rl.process.file_list import INCOMPLETE, MANIFEST, find_fault
from mcore_rl.process.file_lock import LockedError, hold_lock
from mcore_rl.process.lease import hold_lease
from mcore_rl.process.log_files import rotate
from mcore_rl.process.redaction import RedactingFormatter

DAMAGED = ".damaged"
"""Suffix of a checkpoint that was found damaged when a run resumed."""
EARLIER = f".earlier{DELETED}"
"""Suffix of a part of a checkpoint that is saved again; not DELETED, which a rank's save uses."""
_EARLIER_PARITY_CHECK = "canary.json"
"""The name of parity_check.json in version 0.1; a run that continues takes the file over."""
_log = logging.getLogger(__name__)


class RunFolder:
    def __init__(self, path: str | Path, has_critic: bool = False) -> None:
        """`has_critic`: a checkpoint is complete only with the critic's part."""
        self.path = Path(path).absolute()
        self._has_critic = has_critic
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "hf"
        self.critic_export = self.path / "critic_hf"
        self.parity_check = self.path / "parity_check.json"
        self.kept_samples = self.path / "kept_samples"
        self._finished = self.path / "finished.json"
        self.begun_steps: list[int] = []
        """Steps whose checkpoints this process began to write."""
        self.failed_saves: dict[int, str] = {}
        """Why checkpoints that this process began could not be written, by step."""

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create the folder and hold its lock for the block, so that no other command writes there.

        A process that was stopped for so long that another host's took the folder over ends at
        once, with status 1. Raises ValueError that names the process which holds the lock, or the
        folder if it cannot be written to.
        """
        with ExitStack() as stack:
            try:
                with _refuse_run_dir(self.path):
                    self.path.mkdir(parents=True, exist_ok=True)
                    is_locked = stack.enter_context(hold_lock(self.path / "run.lock"))
                    lease = hold_lease(self.path / "run.lease", is_locked, _end_at_once)
                    stack.enter_context(lease)
            except LockedError as error:
                raise ValueError(
                    f"the run folder {self.path} is in use by {error.holder}: wait until that run"
                    " ends, stop it, or choose another run.dir"
                ) from None
            yield

    def prepare(
        self, written: Mapping[str, Any], *, resume: bool, rotate_bytes: int = 0
    ) -> Path | None:
        """Create the folder, write the configuration, and send this process's log to its file.

        Returns the checkpoint to continue from. Without `resume` there is none: an earlier run's
        checkpoints are moved aside, so that a later resume does not take them for this run's, and
        its parity_check.json and its kept samples are deleted.

        written        the configuration as plain values, without secrets
        rotate_bytes   size at which the log becomes a segment; 0: never
        """
        with _refuse_run_dir(self.path):
            if self.checkpoints.exists() and not resume:
                self.checkpoints.rename(
                    self.path / f"checkpoints.before_{time.strftime('%Y%m%d_%H%M%S')}"
                )
            earlier = self.path / _EARLIER_PARITY_CHECK
            if earlier.exists() and not self.parity_check.exists():
                earlier.rename(self.parity_check)
            if not resume:
                self.parity_check.unlink(missing_ok=True)
                shutil.rmtree(self.kept_samples, ignore_errors=True)
                self._finished.unlink(missing_ok=True)
            self.logs.mkdir(parents=True, exist_ok=True)
            OmegaConf.save(OmegaConf.create(dict(written)), self.path / "config.yaml")
            handler = _LogFile(self.logs / "controller.log", rotate_bytes)
        handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        package = logging.getLogger("mcore_rl")
        package.setLevel(logging.INFO)
        package.addHandler(handler)
        return self.newest_checkpoint()

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def step_export(self, step: int) -> Path:
        return self.path / "hf_steps" / f"step_{step:06d}"

    def critic_checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"critic_{step:06d}"

    def find_critic(self, checkpoint: Path) -> Path:
        """Return the critic's part of the checkpoint of a step."""
        return self.critic_checkpoint(int(checkpoint.name.rpartition("_")[2]))

    def newest_checkpoint(self) -> Path | None:
        """Return the complete checkpoint of the highest step, or None.

        A damaged one counts here, as `complete_steps` says, so that a resume refuses it by name.
        """
        steps = self.complete_steps()
        return self.checkpoint(steps[-1]) if steps else None

    def is_saved(self, step: int) -> bool:
        """Return whether the checkpoint of a step is there with all its parts and their lists."""
        return all((part / MANIFEST).is_file() for part in self.list_parts(step))

    def list_incomplete(self, after: int) -> list[str]:
        """Return the names of checkpoints of steps above `after` whose write was not completed."""
        names = (path.name for path in self.checkpoints.glob(f"*{INCOMPLETE}"))
        found = (re.fullmatch(rf"[a-z]+_(\d+){INCOMPLETE}", name) for name in names)
        return sorted(match[0] for match in found if match and int(match[1]) > after)

    def note_finished(self, step: int) -> None:
        """Keep that a command did all it had to do, the last step and the exports included."""
        write_whole(self._finished, json.dumps({"step": step}), lasting=True)

    def read_finished_step(self) -> int:
        """Return the last step of a command that did all it had to do; 0: none did."""
        if not self._finished.is_file():
            return 0
        return int(json.loads(self._finished.read_text())["step"])

    def list_parts(self, step: int) -> list[Path]:
        """Return the folders that make up the checkpoint of a step."""
        parts = [self.checkpoint(step), self.critic_checkpoint(step)]
        return parts if self._has_critic else parts[:1]

    def move_damaged(self, step: int) -> None:
        """Rename a damaged checkpoint, so that it no longer counts and is not deleted."""
        for path in self.list_parts(step):
            aside = path.with_name(path.name + DAMAGED)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)

    def set_aside(self, step: int) -> None:
        """Rename the parts of a step whose save begins, so that none of them counts with new ones.

        A part that an earlier process has left is of other samples than those that come now. The
        next `prune` deletes it.
        """
        for path in filter(Path.exists, self.list_parts(step)):
            aside = path.with_name(path.name + EARLIER)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)

    def prune(self, keep: int, others: Collection[int] = ()) -> None:
        """Delete all whole checkpoints except the newest `keep` and those of the steps `others`.

        A checkpoint that is not what its list of files proves is neither counted nor deleted.
        The others are renamed first: a checkpoint that is half deleted must not look complete.
        """
        whole = [
            step
            for step in self.complete_steps()
            if not any(map(find_fault, self.list_parts(step)))
        ]
        for step in sorted(set(whole[:-keep]) - set(others)):
            for path in (self.checkpoint(step), self.critic_checkpoint(step)):
                if path.exists():
                    path.rename(path.with_name(path.name + DELETED))
        for path in self.checkpoints.glob(f"*{DELETED}"):
            shutil.rmtree(path)

    def complete_steps(self) -> list[int]:
        """Return, in order, the steps whose checkpoints have all their parts, each with its list.

        The list of files is written last. A folder without it counts if it has the files of a
        checkpoint, as older versions left them.
        """
        found = (re.fullmatch(r"step_(\d{6,})", p.name) for p in self.checkpoints.glob("step_*"))
        steps = sorted(int(name[1]) for name in found if name)
        return [step for step in steps if all(map(_is_counted, self.list_parts(step)))]


def _is_counted(folder: Path) -> bool:
    if (folder / MANIFEST).is_file():
        return True
    fault = find_fault(folder)
    if fault and folder.exists():
        _log.warning("%s: it is not a checkpoint and does not count", fault)
    return not fault


def _end_at_once(reason: str) -> None:
    """End this process before it writes anything more; its watchdog ends what it started."""
    print(f"mcore-rl: {reason}: this process ends and writes nothing more", file=sys.stderr)
    sys.stderr.flush()
    relaunch.note_end()
    os._exit(1)


@contextmanager
def _refuse_run_dir(path: Path) -> Iterator[None]:
    """Raise ValueError if the body cannot write below `path`, DiskFullError if the disk is full."""
    with report_full_disk(path):
        try:
            yield
        except OSError as error:
            if is_disk_full(error):
                raise
            raise ValueError(f"run.dir={path}: {error}; choose another run.dir") from None


class _LogFile(logging.FileHandler):
    """A log that takes any text and says once that it cannot be written: a run does without it.

    Once it has `rotate_bytes`, it becomes a segment and a new one begins; 0: never.
    """

    def __init__(self, path: Path, rotate_bytes: int = 0) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._rotate_bytes = rotate_bytes
        self._was_told = False

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        stream: Any = self.stream
        if not self._rotate_bytes or stream is None:
            return
        try:
            if os.fstat(stream.fileno()).st_size >= self._rotate_bytes:
                stream.close()
                self.stream: Any = None  # the next record opens it
                rotate(Path(self.baseFilename))
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._was_told:
            self._was_told = True
            told = explain_loss(self.baseFilename, error)
            print(f"the run goes on, its log is lost: {told}", file=sys.stderr)
