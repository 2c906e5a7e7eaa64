"""Checkpoints of other programs are merged, too, or a part of them is left out by name.

The checkpoints are written by megatron-core.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_tools.foreign_keys import drop_tensors, explain_unknown, find_part
from checkpoint_tools.stored import Checkpoint, Chunk, StoredTensor
from mcore_rl.config import ModelConfig, ParallelConfig, TrainConfig
from mcore_rl.train.actor import Actor
from mcore_rl.train.checkpoint_save import start_save
from tests.checkpoint_tools.conftest import step, write_source
from tests.support.distributed import run_ranks
from tests.support.once_per_run import made_once
from tests.support.small_hf import assert_equal, read_all
from tests.support.tiny_training import make_actor

LAYOUTS: Mapping[str, dict[str, Any]] = {
    "qwen3_moe": {"tp": 2, "ep": 2},
    "deepseek_v3": {"pp": 2},
    "gpt_oss": {"tp": 2},
}
MTP_KEY = "mtp.layers.0.enorm.weight"


def _metadata(single: bool) -> dict[str, Any]:
    from megatron.core import parallel_state as ps

    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": single,
        "chained_optim_avoid_prefix": True,
    }


def _save(state: dict[str, Any], folder: Path) -> None:
    start_save({**state, "step": 1}, folder).finish(timeout_s=60)


def _save_singletons(actor: Actor, folder: Path) -> None:
    from megatron.core.utils import unwrap_model

    metadata = _metadata(single=True)
    state: dict[str, Any] = {
        "model": unwrap_model(actor.chunks[0]).sharded_state_dict(metadata=metadata)
    }
    state["optimizer"] = actor.optimizer.sharded_state_dict(state, metadata=metadata)
    _save(state, folder)


def _save_with_mtp(actor: Actor, folder: Path) -> None:
    """Save the actor's weights in a model with one more layer, for multi-token prediction."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.utils import unwrap_model

    from mcore_rl.train.transformer_config import make_transformer_config, rotary_options
    from mcore_rl.weights.hf.config import pad_vocab_size

    hf_config = actor.hf_config
    config = make_transformer_config(hf_config, ParallelConfig(tp=2), torch.float32, TrainConfig())
    config.mtp_num_layers = 1
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    model = GPTModel(
        config,
        spec,
        vocab_size=pad_vocab_size(hf_config, 2),
        max_sequence_length=hf_config["max_position_embeddings"],
        **rotary_options(hf_config),
        share_embeddings_and_output_weights=False,
        mtp_block_spec=gpt_layer_specs.get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=True
        ),
    )
    model.load_state_dict(unwrap_model(actor.chunks[0]).state_dict(), strict=False)
    _save({"model": model.sharded_state_dict(metadata=_metadata(single=False))}, folder)


def save_all(rank: int, world_size: int, port: int, root: Path) -> None:
    """Save each family with singletons, one also without, and one with an MTP layer."""
    for kind, layout in LAYOUTS.items():
        model = ModelConfig(path=str(root / kind / "hf"))
        actor = make_actor(rank, world_size, port, model, ParallelConfig(**layout))
        if kind == "qwen3_moe":
            step(actor)
            actor.save(root / kind / "step", {})
            actor.finish_save()
        _save_singletons(actor, root / kind / "single")
    model = ModelConfig(path=str(root / "deepseek_v3/hf"))
    actor = make_actor(rank, world_size, port, model, ParallelConfig(tp=2))
    _save_with_mtp(actor, root / "deepseek_v3/mtp")


def _write_all(root: Path) -> None:
    for kind in LAYOUTS:
        write_source(kind, root / kind / "hf")
    run_ranks(save_all, 2, root, timeout_s=200)


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with <kind>/hf and <kind>/single, and what `save_all` adds."""
    return made_once(tmp_path_factory, "foreign_checkpoints", _write_all)


@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_singleton_shards_are_merged(
    foreign: Path, tmp_path: Path, command: Any, kind: str
) -> None:
    source = foreign / kind / "hf"
    single = foreign / kind / "single"
    assert command("to-hf", single, tmp_path / "out", "--source-hf", source) == 0
    assert_equal(tmp_path / "out", source)
    assert command("verify", single, source) == 0


@pytest.mark.gloo
def test_optimizer_state_of_singleton_shards_is_merged(
    foreign: Path, tmp_path: Path, command: Any
) -> None:
    source = foreign / "qwen3_moe/hf"
    for name in ("step", "single"):
        arguments = ("--source-hf", source, "--optimizer", tmp_path / f"{name}_adam")
        assert command("to-hf", foreign / "qwen3_moe" / name, tmp_path / name, *arguments) == 0
    assert_equal(tmp_path / "step", tmp_path / "single")
    assert_equal(tmp_path / "step_adam", tmp_path / "single_adam")


@pytest.mark.gloo
def test_layers_for_multi_token_prediction_are_merged_or_left_out_by_name(
    foreign: Path, tmp_path: Path, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source, saved = foreign / "deepseek_v3/hf", foreign / "deepseek_v3/mtp"
    assert command("to-hf", saved, tmp_path / "whole", "--source-hf", source) == 0
    further = read_all(tmp_path / "whole").keys() - read_all(source).keys()
    assert further and all(name.startswith("model.layers.") for name in further), further
    merge = ("to-hf", saved, tmp_path / "out", "--source-hf", source)
    assert command(*merge, "--leave-out", "mtb.*") == 2
    assert "--leave-out 'mtb.*' matches none of the" in capsys.readouterr().err
    assert command(*merge, "--leave-out", "mtp.*") == 0
    assert_equal(tmp_path / "out", source)
    assert command("verify", saved, tmp_path / "out") == 1  # they differ
    assert command("verify", saved, tmp_path / "out", "--leave-out", "mtp.*") == 0


@pytest.mark.parametrize(
    ("key", "shape", "offset", "expected"),
    [
        ("a.linear_fc1.weight_w", (6, 4), (3, 0), ("a.linear_fc1.weight", (12, 4), (3, 0))),
        ("a.linear_fc1.weight_v", (6, 4), (3, 0), ("a.linear_fc1.weight", (12, 4), (9, 0))),
        ("a.linear_fc1.bias_v", (6,), (0,), ("a.linear_fc1.bias", (12,), (6,))),
        ("a.experts.5.b.weight", (6, 4), (3, 0), ("a.experts.b.weight", (8, 6, 4), (5, 3, 0))),
        (
            "a.experts.5.linear_fc1.weight_v",
            *((6, 4), (0, 0)),
            ("a.experts.linear_fc1.weight", (8, 12, 4), (5, 6, 0)),
        ),
        ("a.experts.b.weight", (8, 6, 4), (5, 0, 0), ("a.experts.b.weight", (8, 6, 4), (5, 0, 0))),
    ],
)
def test_a_chunk_is_part_of_the_tensor_in_the_table(
    key: str, shape: Any, offset: Any, expected: Any
) -> None:
    chunk = Chunk(key, "float32", offset, shape, "file", 0, 1, is_archive=True)
    part = find_part(StoredTensor(key, "float32", shape, (chunk,)), chunk, 8, "3")
    assert (part.key, part.global_shape, part.global_offset) == expected
    assert part.local_shape == (1, *shape)[-len(part.global_shape) :] and part.tensor == "3"


def test_tensors_and_their_optimizer_state_are_left_out(tmp_path: Path) -> None:
    keys = [MTP_KEY, "optimizer.state.exp_avg." + MTP_KEY, "chained_0.optimizer.state.param.a", "a"]
    tensors = {key: StoredTensor(key, "float32", (), ()) for key in keys}
    checkpoint = Checkpoint("torch_dist", tmp_path, tensors, (), None)
    [left] = drop_tensors([checkpoint], ["mtp.*"])
    assert list(left.tensors) == keys[2:]
    assert drop_tensors([checkpoint], []) == [checkpoint]
    with pytest.raises(ValueError, match=r"--leave-out 'b\*' matches none of the 4 tensors of"):
        drop_tensors([checkpoint], ["a", "b*"])


def test_the_remedy_for_an_unknown_tensor_is_named() -> None:
    assert "multi-token prediction" in explain_unknown(MTP_KEY)
    assert "--leave-out PATTERN" in explain_unknown("decoder.layers.0.adapter.weight")
