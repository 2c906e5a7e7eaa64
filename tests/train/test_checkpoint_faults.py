"""NaN in a checkpoint, and damage that no checksums show, are told with file and tensor."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.train.actor import Actor
from mcore_rl.train.checkpoint import name_damage
from mcore_rl.weights.hf.checksums import MANIFEST
from tests.support.distributed import run_ranks
from tests.support.tiny_training import make_actor, write_hf_model
from tests.train.test_checkpoint import OPTIMIZER


def refuse_faults(rank: int, world_size: int, port: int, model: ModelConfig, root: Path) -> Any:
    """Return the messages of loads: of NaN in a weight, of damage that no checksums show."""
    actor = make_actor(rank, world_size, port, model, ParallelConfig(), OPTIMIZER)
    actor.save(root / "step_0", {})
    actor.finish_save()
    parameter = next(iter(actor.chunks[0].parameters()))
    with torch.no_grad():
        parameter.view(-1)[3] = float("nan")
    actor.save(root / "step_1", {})
    actor.finish_save()
    messages = [refusal(actor, root / "step_1")]
    for kind in ("cut", "flipped"):
        folder = root / kind
        shutil.copytree(root / "step_0", folder)
        (folder / MANIFEST).unlink()
        file = folder / "__0_0.distcp"
        content = bytearray(file.read_bytes())
        if kind == "cut":
            del content[-5000:]
        else:
            content[content.rindex(b"PK\x01\x02") + 1] ^= 1  # the directory of the last archive
        file.write_bytes(content)
        messages.append(refusal(actor, folder))
    actor.load(root / "step_0")
    with pytest.raises(KeyError, match="another"), name_damage(root / "step_0"):
        raise KeyError("another error")
    return messages


def refusal(actor: Actor, folder: Path) -> str:
    with pytest.raises(ValueError) as refused:
        actor.load(folder)
    return str(refused.value)


@pytest.mark.gloo
def test_nan_and_damage_are_named_with_file_and_tensor(tmp_path: Path) -> None:
    model = ModelConfig(path=str(write_hf_model(tmp_path / "model")))
    [[nan, cut, flipped]] = run_ranks(refuse_faults, 1, model, tmp_path)
    file = tmp_path / "step_1" / "__0_"
    assert nan.startswith(f"step 0: {file}"), nan
    assert "has 1 of" in nan and "tensor '" in nan and "move the checkpoint's folder aside" in nan
    assert cut.startswith(f"{tmp_path}/cut/__0_0.distcp: '"), cut
    assert flipped.startswith(f"{tmp_path}/flipped/__0_0.distcp: "), flipped
    assert " is damaged" in flipped, flipped
    assert "newest_whole" in flipped and "\n" not in nan + cut + flipped
