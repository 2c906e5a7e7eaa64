"""Writes the checkpoints of tests/train/checkpoints/megatron_core_0_16.tar.xz.

It ran with megatron-core 0.16.1, in the last version of this package that stood on it:

    python -m tests.support.old_checkpoint megatron_core_0_16

`run` is a step's folder of this package; `plain` is what megatron-core alone wrote of the same
state, without checksums. expected.json has what the run went on with, and the hash of the merged
model.
"""

import json
import multiprocessing
import shutil
import sys
import tarfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from checkpoint_tools.cli import main
from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from mcore_rl.train.actor import Actor
from mcore_rl.types import StepStats
from tests.support.distributed import run_ranks
from tests.support.policy import ROOT
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    my_batches,
    token_loss,
    write_hf_model,
)

OPTIMIZER = OptimizerConfig(
    lr=1e-3, schedule="cosine", warmup_steps=1, weight_decay=0.1, clip_grad=0.5
)
FOLDER = "megatron_core_0_16"
LAYOUT: dict[str, Any] = {"tp": 2, "ep": 2}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 24}
SIZES |= {"moe_intermediate_size": 8, "num_experts": 4, "num_attention_heads": 2}
EXTRA = {"prompts": {"position": 7}, "step": 2}


def take_step(actor: Actor) -> StepStats | None:
    return actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)


def train_and_save(rank: int, world_size: int, port: int, path: str, out: Path) -> Any:
    """Take two steps, save by this package and by megatron-core alone, and take two more."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from mcore_rl.train import checkpoint

    model = ModelConfig(path=path)
    actor = make_actor(rank, world_size, port, model, ParallelConfig(**LAYOUT), OPTIMIZER)
    take_step(actor)
    take_step(actor)
    actor.save(out / "run", EXTRA)
    actor.finish_save()
    state = actor._checkpointer._state
    sharded = checkpoint._make_sharded_state(state, is_loading=False, readable=lambda value: value)
    sharded |= {"rng": checkpoint._rng_object(), "step": 2, "extra": EXTRA}
    sharded |= {"layout": checkpoint._layout(state.parallel)}
    if rank == 0:
        (out / "plain").mkdir()
    dist.barrier()
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # megatron-core forks its writers
    dist_checkpointing.save(sharded, str(out / "plain"))
    stats = [take_step(actor), take_step(actor)]
    return [stat and (stat.loss, stat.grad_norm) for stat in stats]


def unpack_old_checkpoints(folder: Path) -> Path:
    """Return a folder below `folder` with what this module wrote."""
    with tarfile.open(ROOT / f"tests/train/checkpoints/{FOLDER}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / FOLDER


def hash_merged(checkpoint: Path, model: Path, out: Path) -> dict[str, str]:
    """Merge a checkpoint into `out`; return the hash of each file of weights."""
    assert not main(["to-hf", str(checkpoint), str(out), "--source-hf", str(model)])
    files = out.glob("*.safetensors")
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in files}


def write_all(out: Path) -> None:
    out.mkdir(parents=True)
    model = write_hf_model(out / "model", **SIZES, mlp_only_layers=[1])
    results = run_ranks(train_and_save, 2, str(model), out)
    merged = out / "merged"
    assert not main(["to-hf", str(out / "run"), str(merged), "--source-hf", str(model)])
    sums = {
        path.name: sha256(path.read_bytes()).hexdigest() for path in merged.glob("*.safetensors")
    }
    expected = {"stats": next(r for r in results if r[0]), "merged": sums}
    shutil.rmtree(merged)
    (out / "expected.json").write_text(json.dumps(expected, indent=2))


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
