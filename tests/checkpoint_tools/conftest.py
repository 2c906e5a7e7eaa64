"""Checkpoints of every family that megatron-core itself wrote, by one launch of two processes."""

import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from checkpoint_tools.cli import main
from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from mcore_rl.train.actor import Actor
from mcore_rl.train.critic import CriticModel
from mcore_rl.train.runtime import init_distributed
from mcore_rl.types import StepStats
from tests.support.distributed import run_ranks
from tests.support.once_per_run import made_once
from tests.support.tiny_models import write_model
from tests.support.tiny_training import NUM_TOKENS, make_actor, my_batches, token_loss

LAYOUTS: Mapping[str, dict[str, Any]] = {
    "qwen3_moe": {"tp": 2, "ep": 2},
    "mixed_moe": {"pp": 2},
    "qwen3": {"pp": 2, "vpp": 2},
    "qwen2": {"tp": 2},
    "llama": {"dp": 2},
    "deepseek_v3": {"tp": 2, "etp": 2},
    "deepseek_v2": {"ep": 2},
    "gpt_oss": {"tp": 2, "ep": 2},
    "qwen3_next": {"tp": 2, "ep": 2},
    "qwen3_5_moe": {"pp": 2},
}
USED_ELSEWHERE = ("qwen3_moe", "deepseek_v3", "qwen3")
"""Families of the tests that convert none of a given kind."""
MTP = ("model.layers.4.eh_proj.weight", "model.layers.4.mlp.up_proj.weight")
"""Tensors that Megatron's model does not have."""


def write_source(kind: str, folder: Path) -> Path:
    if kind == "mixed_moe":
        return write_model("qwen3_moe", folder, seed=1, mlp_only_layers=[1])
    if kind != "deepseek_v3":
        return write_model(kind, folder)
    write_model(kind, folder, num_nextn_predict_layers=1)
    path = folder / "model.safetensors"
    more = {name: torch.randn(700, 130, dtype=torch.bfloat16) for name in MTP}
    save_file(load_file(path) | more, path, metadata={"format": "pt"})
    return folder


def go_on_twice(rank: int, actor: Actor, root: Path) -> list[Any]:
    """Return the statistics of two steps, and of the same two after a round trip through to-hf."""
    straight = [step(actor), step(actor)]
    source, names, out = root / "qwen3_moe/hf", root / "in_hf_names", root / "resumed"
    if rank == 0:
        state = ["--optimizer", str(root / "adam"), "--workers=1"]
        saved = str(root / "qwen3_moe/step")
        assert main(["to-hf", saved, str(names), "--source-hf", str(source), *state]) == 0
        assert main(["from-hf", str(names), str(out), *state]) == 0
    dist.barrier()
    assert actor.load(out) == {"prompts": {"position": 7}}
    return [straight, [step(actor), step(actor)]]


def step(actor: Actor) -> StepStats | None:
    return actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)


def save_all(rank: int, world_size: int, port: int, root: Path, kinds: Sequence[str]) -> list[Any]:
    """Load each family's `megatron` into a random model, save it to `step`; train one of them."""
    resumed: list[Any] = []
    for kind in kinds:
        layout = LAYOUTS[kind]
        model = ModelConfig(path=str(root / kind / "hf"), init="random")
        actor = make_actor(rank, world_size, port, model, ParallelConfig(**layout))
        actor.load(root / kind / "megatron")
        if kind == "qwen3_moe":
            step(actor)
            actor.export_hf(root / "exported")
        actor.save(root / kind / "step", {"prompts": {"position": 7}})
        actor.finish_save()
        if kind == "qwen3_moe":
            resumed = go_on_twice(rank, actor, root)
    train, optimizer = TrainConfig(), OptimizerConfig(lr=1e-3)
    parallel = ParallelConfig(**LAYOUTS["deepseek_v2"])
    init_distributed(rank, world_size, "127.0.0.1", port, parallel, seed=0, timeout_s=60)
    critic = CriticModel(
        ModelConfig(path=str(root / "qwen3_moe/hf")), parallel, train, optimizer, 6, seed=0
    )
    critic.save(root / "critic" / "step", {})
    critic.finish_save()
    critic.export_hf(root / "critic" / "exported")
    return resumed


@pytest.fixture(scope="session")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with <kind>/hf, <kind>/megatron and <kind>/step of each family asked for.

    hf is a HuggingFace directory, megatron is made of it by from-hf, step is loaded from that and
    saved.
    """
    asked = {
        item.callspec.params.get("kind")
        for item in request.session.items
        if item.path == Path(__file__).with_name("test_convert.py")
        and isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
    }
    kinds = [kind for kind in LAYOUTS if kind in asked or kind in USED_ELSEWHERE]
    return made_once(tmp_path_factory, "checkpoints", partial(_save_each, kinds))


def _save_each(kinds: Sequence[str], root: Path) -> None:
    for kind in kinds:
        write_source(kind, root / kind / "hf")
        assert (
            main(["from-hf", str(root / kind / "hf"), str(root / kind / "megatron"), "--workers=1"])
            == 0
        )
    resumed = run_ranks(save_all, 2, root, kinds, timeout_s=200)
    (root / "resumed.pickle").write_bytes(pickle.dumps(resumed))


def run(*arguments: Any) -> int:
    """The command's exit status; in this process."""
    workers = [] if arguments[0] in ("inspect", "checksums") else ["--workers=1"]
    return main([*map(str, arguments), *workers])


@pytest.fixture
def command() -> Any:
    return run
