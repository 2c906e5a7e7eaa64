"""A checkpoint's parts are those of one launch, whichever part an earlier launch has left."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config import CheckpointConfig
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.run.roles.trainer import PackedCritic, PackedTokenTrainer, Packing
from tests.support.checkpoint_folders import write_checkpoint


class SavingRanks:
    """Ranks that begin saves, which the test commits later."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def save(self, folder: str, extra: dict[str, Any]) -> None:
        self.begun.append(folder)


@pytest.mark.parametrize("left", ["critic", "step"])
def test_parts_of_two_launches_never_count_as_one_checkpoint(tmp_path: Path, left: str) -> None:
    folder, checkpoint = RunFolder(tmp_path, has_critic=True), CheckpointConfig()
    write_checkpoint(folder.checkpoints / f"{left}_000010")  # by a launch that was killed then
    packing = Packing(2, 2, max_tokens=12)
    ranks: Any = SavingRanks()
    critic = PackedCritic(ranks, folder, packing=packing, checkpoint=checkpoint)
    trainer = PackedTokenTrainer(
        ranks, folder, packing=packing, temperature=1.0, checkpoint=checkpoint
    )
    for role, save in (
        ("critic", partial(critic.save, 10)),
        ("step", partial(trainer.save, 10, {})),
    ):
        save()
        if role != left:  # the other one commits first
            write_checkpoint(folder.checkpoints / f"{role}_000010")
            assert not folder.is_saved(10) and folder.newest_checkpoint() is None
    assert len(ranks.begun) == 2
    write_checkpoint(folder.checkpoints / f"{left}_000010")
    assert folder.is_saved(10)
    names = sorted(path.name for path in folder.checkpoints.iterdir())
    assert names == ["critic_000010", "step_000010"], "what was set aside is deleted"
