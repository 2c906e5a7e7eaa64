"""The folder of a run: where its log, configuration, checkpoints and export lie, and which checkpoint is the
newest.

    logs/            controller.log, one file per rank and per engine
    config.yaml      the recipe with all overrides and defaults
    checkpoints/     step_000010, ...; a folder that bears its own name is complete
    hf/              the exported policy
    metrics.jsonl, samples.jsonl, tensorboard/, summary.json, reward_curve.png
"""

import logging
import re
import shutil
import time
from pathlib import Path

from omegaconf import OmegaConf

from mcore_rl.config import Config

DELETED = ".deleted"


class RunFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "hf"

    def prepare(self, config: Config) -> Path | None:
        """Make the folder, keep the configuration in it, and send this process's log records to its file.

        Returns the checkpoint to continue from. With run.resume=false there is none, and the checkpoints of
        an earlier run are moved aside, lest a later resume takes them for this run's.
        """
        if self.checkpoints.exists() and not config.run.resume:
            self.checkpoints.rename(self.path / f"checkpoints.before_{time.strftime('%Y%m%d_%H%M%S')}")
        self.logs.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.structured(config), self.path / "config.yaml")
        handler = logging.FileHandler(self.logs / "controller.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        package = logging.getLogger("mcore_rl")
        package.setLevel(logging.INFO)
        package.addHandler(handler)
        return self.newest_checkpoint()

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def newest_checkpoint(self) -> Path | None:
        """The complete checkpoint of the highest step."""
        return max(self._complete(), default=None)

    def prune(self, keep: int) -> None:
        """Delete all complete checkpoints but the newest `keep`; what is half deleted bears no such name."""
        for path in sorted(self._complete())[:-keep]:
            path.rename(path.with_name(path.name + DELETED))
        for path in self.checkpoints.glob(f"*{DELETED}"):
            shutil.rmtree(path)

    def _complete(self) -> list[Path]:
        return [p for p in self.checkpoints.glob("step_*") if re.fullmatch(r"step_\d{6}", p.name)]
