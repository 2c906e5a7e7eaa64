"""Names the files of a run's folder, holds its lock and finds its newest checkpoint.

run.lock         locked while a command writes here; names the process that did last
logs/            controller.log, one file per rank and per engine
config.yaml      the recipe with all overrides and defaults, without secrets
checkpoints/     step_000010, critic_000010, ...; an incomplete one has another name
hf/, critic_hf/  the exported policy and critic
profile/         captures of steps, if the recipe asks for them
metrics.jsonl, samples.jsonl, episodes.jsonl, tensorboard/, summary.json, reward_curve.png
"""

import logging
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from omegaconf import OmegaConf

from mcore_rl.config import Config
from mcore_rl.config.secrets import written_config
from mcore_rl.process.disk import describe_full_disk, is_disk_full, reporting_full_disk
from mcore_rl.process.file_lock import LockedError, holding_lock
from mcore_rl.process.redaction import RedactingFormatter

DELETED = ".deleted"


class RunFolder:
    def __init__(self, path: str | Path, has_critic: bool = False) -> None:
        """With `has_critic`, a checkpoint is complete once the critic's part is there as well."""
        self.path = Path(path).absolute()
        self._has_critic = has_critic
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "hf"
        self.critic_export = self.path / "critic_hf"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing into the folder, which is created, meanwhile.

        Raises ValueError that names the process that does so already, or the folder if it cannot be
        written to.
        """
        with ExitStack() as stack:
            try:
                with _refusing_run_dir(self.path):
                    self.path.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(holding_lock(self.path / "run.lock"))
            except LockedError as error:
                raise ValueError(
                    f"the run folder {self.path} is in use by {error.holder}: wait until that run"
                    " ends, stop it, or choose another run.dir"
                ) from None
            yield

    def prepare(self, config: Config) -> Path | None:
        """Create the folder, keep the configuration in it, and log this process to its file.

        Returns the checkpoint to continue from. With run.resume=false there is none: checkpoints of
        an earlier run are moved aside, so that a later resume does not mistake them for this run's.
        """
        with _refusing_run_dir(self.path):
            if self.checkpoints.exists() and not config.run.resume:
                self.checkpoints.rename(
                    self.path / f"checkpoints.before_{time.strftime('%Y%m%d_%H%M%S')}"
                )
            self.logs.mkdir(parents=True, exist_ok=True)
            OmegaConf.save(OmegaConf.create(written_config(config)), self.path / "config.yaml")
            handler = _LogFile(self.logs / "controller.log")
        handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        package = logging.getLogger("mcore_rl")
        package.setLevel(logging.INFO)
        package.addHandler(handler)
        return self.newest_checkpoint()

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def critic_checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"critic_{step:06d}"

    def newest_checkpoint(self) -> Path | None:
        """Return the complete checkpoint of the highest step, or None."""
        steps = self._complete_steps()
        return self.checkpoint(max(steps)) if steps else None

    def prune(self, keep: int) -> None:
        """Delete all complete checkpoints except the newest `keep`.

        They are renamed first: a checkpoint that is half deleted must not look complete.
        """
        for step in sorted(self._complete_steps())[:-keep]:
            for path in (self.checkpoint(step), self.critic_checkpoint(step)):
                if path.exists():
                    path.rename(path.with_name(path.name + DELETED))
        for path in self.checkpoints.glob(f"*{DELETED}"):
            shutil.rmtree(path)

    def _complete_steps(self) -> set[int]:
        """Return the steps whose checkpoints have all their parts."""
        parts = ("step", "critic") if self._has_critic else ("step",)
        return set.intersection(*(self._saved_steps(part) for part in parts))

    def _saved_steps(self, part: str) -> set[int]:
        names = (
            re.fullmatch(part + r"_(\d{6})", path.name)
            for path in self.checkpoints.glob(f"{part}_*")
        )
        return {int(name[1]) for name in names if name}


@contextmanager
def _refusing_run_dir(path: Path) -> Iterator[None]:
    """Raise ValueError if the body cannot write below `path`, DiskFullError if the disk is full."""
    with reporting_full_disk(path):
        try:
            yield
        except OSError as error:
            if is_disk_full(error):
                raise
            raise ValueError(f"run.dir={path}: {error}; choose another run.dir") from None


class _LogFile(logging.FileHandler):
    """A log that takes any text and reports a full disk once, as the run can do without it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._is_full = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if error is None or not is_disk_full(error):
            super().handleError(record)
        elif not self._is_full:
            self._is_full = True
            print(describe_full_disk(self.baseFilename, error), file=sys.stderr)
