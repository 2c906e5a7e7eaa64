"""The folder of a run: where its log, configuration, checkpoints and export lie, and which checkpoint is the
newest.

    logs/            controller.log, one file per rank and per engine
    config.yaml      the recipe with all overrides and defaults
    checkpoints/     step_000010, critic_000010, ...; a folder that bears its own name is complete
    hf/, critic_hf/  the exported policy, and critic
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
    def __init__(self, path: str | Path, has_critic: bool = False) -> None:
        """`has_critic`: a checkpoint counts once that of the critic is there as well."""
        self.path, self._has_critic = Path(path).absolute(), has_critic
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.export, self.critic_export = self.path / "hf", self.path / "critic_hf"

    def prepare(self, config: Config) -> Path | None:
        """Make the folder, keep the configuration in it, and send this process's log records to its file.

        Returns the checkpoint to continue from. With run.resume=false there is none, and the checkpoints of
        an earlier run are moved aside, lest a later resume takes them for this run's.
        """
        if self.checkpoints.exists() and not config.run.resume:
            self.checkpoints.rename(
                self.path / f"checkpoints.before_{time.strftime('%Y%m%d_%H%M%S')}"
            )
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"run.dir={config.run.dir}: {error}; choose another run.dir") from None
        OmegaConf.save(OmegaConf.structured(config), self.path / "config.yaml")
        handler = logging.FileHandler(self.logs / "controller.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        package = logging.getLogger("mcore_rl")
        package.setLevel(logging.INFO)
        package.addHandler(handler)
        return self.newest_checkpoint()

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def critic_checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"critic_{step:06d}"

    def newest_checkpoint(self) -> Path | None:
        """The complete checkpoint of the highest step."""
        steps = self._complete()
        return self.checkpoint(max(steps)) if steps else None

    def prune(self, keep: int) -> None:
        """Delete all complete checkpoints but the newest `keep`; what is half deleted bears no such name."""
        for step in sorted(self._complete())[:-keep]:
            for path in (self.checkpoint(step), self.critic_checkpoint(step)):
                if path.exists():
                    path.rename(path.with_name(path.name + DELETED))
        for path in self.checkpoints.glob(f"*{DELETED}"):
            shutil.rmtree(path)

    def _complete(self) -> set[int]:
        """Steps of which everything is there."""
        parts = ("step", "critic") if self._has_critic else ("step",)
        return set.intersection(*(self._steps_of(part) for part in parts))

    def _steps_of(self, part: str) -> set[int]:
        names = (
            re.fullmatch(part + r"_(\d{6})", path.name)
            for path in self.checkpoints.glob(f"{part}_*")
        )
        return {int(name[1]) for name in names if name}
