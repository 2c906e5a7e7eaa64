"""Run folders: what is kept where, and which checkpoint counts."""

import logging

from omegaconf import OmegaConf

from mcore_rl.config import Config
from mcore_rl.run_folder import RunFolder


def test_only_complete_checkpoints_count_and_the_oldest_are_pruned(tmp_path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.newest_checkpoint() is None
    for step in (2, 4, 10):
        folder.checkpoint(step).mkdir(parents=True)
    (folder.checkpoints / "step_000012.incomplete").mkdir()
    (folder.checkpoints / "step_000001.deleted").mkdir()
    assert folder.newest_checkpoint() == folder.checkpoint(10)
    folder.prune(keep=2)
    left = sorted(p.name for p in folder.checkpoints.iterdir())
    assert left == ["step_000004", "step_000010", "step_000012.incomplete"]


def test_starting_over_moves_old_checkpoints_aside(tmp_path) -> None:
    folder, config = RunFolder(tmp_path), Config()
    folder.checkpoint(5).mkdir(parents=True)
    assert folder.prepare(config) == folder.checkpoint(5)
    config.run.resume = False
    assert folder.prepare(config) is None
    assert folder.newest_checkpoint() is None
    assert len(list(tmp_path.glob("checkpoints.before_*/step_000005"))) == 1


def test_configuration_and_log_are_kept(tmp_path) -> None:
    folder = RunFolder(tmp_path / "run")
    config = Config()
    config.run.steps = 7
    folder.prepare(config)
    logging.getLogger("mcore_rl.unit").info("step 1: rollout")
    assert OmegaConf.load(folder.path / "config.yaml").run.steps == 7
    assert "step 1: rollout" in (folder.logs / "controller.log").read_text()
