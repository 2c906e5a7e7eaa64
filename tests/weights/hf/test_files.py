"""Slices of HuggingFace directories: what transformers saves loads here, and exports load there."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from mcore_rl.weights.hf.config import ModelFacts, read_hf_config
from mcore_rl.weights.hf.files import (
    CarriedFile,
    ExportFile,
    commit_export,
    list_export_targets,
    load_into,
    make_empty_tensors,
    plan_export,
    save_tensors,
    write_export_file,
)
from mcore_rl.weights.hf.folder import INDEX, TEMPORARY
from mcore_rl.weights.hf.opened import open_hf_dir
from mcore_rl.weights.layouts.training import make_training_shards
from mcore_rl.weights.models import family_of, hf_tensor_shapes
from mcore_rl.weights.plan.whole import make_plan
from tests.support.megatron_layout import TrainLayout, model_config, train_ranks
from tests.support.reshard import reshard

LAYOUT = TrainLayout(tp=2, pp=2, dp=2, ep=2, etp=2)


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    settings = {k: v for k, v in model_config(head_dim=4).items() if k != "architectures"}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    model.save_pretrained(path, max_shard_size="2KB")
    (path / "tokenizer.json").write_text("{}")
    return path


def zeros_like_ranks(config: dict, weights: dict, dtype: torch.dtype) -> list[tuple]:
    """The shards and the zeroed tensors of each rank of LAYOUT."""
    ranks = train_ranks(config, weights, LAYOUT)
    tensors = [
        {name: torch.zeros_like(t, dtype=dtype) for name, t in rank.tensors.items()}
        for rank in ranks
    ]
    return [
        (make_training_shards(rank.parts, family_of(config), config), local)
        for rank, local in zip(ranks, tensors, strict=True)
    ]


def read_all(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_load_their_slices_of_a_sharded_directory(hf_dir, dtype):
    assert len(list(hf_dir.glob("*.safetensors"))) > 1
    weights = read_all(hf_dir)
    config = read_hf_config(hf_dir) | {"num_experts": 4, "mlp_only_layers": [1]}
    expected = train_ranks(config, weights, LAYOUT)
    for rank, (shards, tensors) in zip(
        expected, zeros_like_ranks(config, weights, dtype), strict=True
    ):
        load_into(shards, tensors, ModelFacts.read(hf_dir))
        for name, tensor in rank.tensors.items():
            assert torch.equal(tensors[name], tensor.to(dtype)), name


def test_exported_directory_equals_the_source_and_loads_in_transformers(hf_dir, tmp_path):
    config = read_hf_config(hf_dir) | {"num_experts": 4}
    ranks = zeros_like_ranks(config, read_all(hf_dir), torch.float32)
    for shards, tensors in ranks:
        load_into(shards, tensors, ModelFacts.read(hf_dir))
    shapes = hf_tensor_shapes(config)
    files = plan_export(
        shapes, dict.fromkeys(shapes, "float32"), LAYOUT.world_size, max_file_bytes=1024
    )
    assert len(files) > LAYOUT.world_size
    targets = list_export_targets(files, LAYOUT.world_size)
    whole = [make_empty_tensors(shards) for shards in targets]
    reshard(
        make_plan([shards for shards, _ in ranks], targets),
        [tensors for _, tensors in ranks],
        whole,
    )
    for file in files:
        write_export_file(tmp_path, file, whole[file.rank])
    assert not list(tmp_path.glob("*.safetensors"))
    commit_export(tmp_path, files, read_hf_config(hf_dir), "float32", side_files_from=hf_dir)
    exported, source = read_all(tmp_path), read_all(hf_dir)
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[name], source[name]) for name in source)
    assert (tmp_path / "tokenizer.json").is_file()
    assert open_hf_dir(ModelFacts.read(tmp_path)).keys() == source.keys()
    token_ids = torch.arange(12)[None]
    before, after = (
        AutoModelForCausalLM.from_pretrained(path)(token_ids).logits for path in (hf_dir, tmp_path)
    )
    assert torch.equal(before, after)
    assert not list(tmp_path.glob("*.part"))


def test_export_deals_every_tensor_once_and_evenly():
    shapes = {f"w{i}": (1 + i % 7, 16) for i in range(50)}
    dtypes = dict.fromkeys(shapes, "bfloat16")
    files = plan_export(shapes, dtypes, 4, max_file_bytes=1 << 20)
    assert [file.rank for file in files] == [0, 1, 2, 3]
    assert sorted(shard.box.name for file in files for shard in file.shards) == sorted(shapes)
    loads = [sum(shard.num_bytes for shard in file.shards) for file in files]
    assert max(loads) - min(loads) <= 7 * 16 * 2
    small = plan_export(shapes, dtypes, 4, max_file_bytes=1000)
    assert len(small) % 4 == 0
    assert max(sum(shard.num_bytes for shard in file.shards) for file in small) <= 1000 + 7 * 16 * 2


def test_a_commit_that_is_cut_short_lacks_the_models_own_tensors(tmp_path, monkeypatch):
    own, carried = ExportFile("model.safetensors", 0, ()), CarriedFile("mtp.safetensors", ("a",), 1)
    for file in (own, carried):
        (tmp_path / (file.filename + TEMPORARY)).write_bytes(b"x")
    rename = Path.rename

    def rename_once(path: Path, to: Path) -> Path:
        monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("killed"))
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", rename_once)
    with pytest.raises(pytest.fail.Exception, match="killed"):
        commit_export(tmp_path, [own], {}, "float32", carried=[carried])
    assert [path.name for path in tmp_path.glob("*.safetensors")] == [carried.filename]


def test_commit_names_the_rank_that_has_not_written(tmp_path):
    files = plan_export({"a": (2,), "b": (2,)}, {"a": "float32", "b": "float32"}, 2)
    write_export_file(tmp_path, files[0], make_empty_tensors(files[0].shards))
    with pytest.raises(ValueError, match=r"00002-of-00002.*rank 1 has not written"):
        commit_export(tmp_path, files, {}, "float32")
    assert not (tmp_path / INDEX).exists()


def broken(tmp_path: Path, change) -> Path:
    """Write a model directory of one file whose tensors `change` modifies."""
    config = model_config()
    weights = {name: torch.zeros(shape) for name, shape in hf_tensor_shapes(config).items()}
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.pop("model.norm.weight"),
            r"lacks 1 of \d+ tensors, the first is 'model.norm.weight'",
        ),
        (
            lambda w: w.update(extra=torch.zeros(1)),
            r"model.safetensors: tensor 'extra' has no place",
        ),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(9)}),
            r"\(9,\), by config.json .*\(8,\)",
        ),
        (
            lambda w: w.update({"lm_head.weight": w["lm_head.weight"].to(torch.float8_e4m3fn)}),
            "'lm_head.weight' is F8_E4M3, so the model is quantized.*mcore-rl-ckpt dequantize",
        ),
        (
            lambda w: w.update({"lm_head.weight_scale_inv": torch.zeros(1, 1)}),
            "'lm_head.weight_scale_inv' holds scales .*mcore-rl-ckpt dequantize",
        ),
    ],
)
def test_missing_surplus_and_misshapen_tensors_are_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load_into([], {}, ModelFacts.read(broken(tmp_path, change)))


def test_incomplete_directories_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config.json does not exist"):
        open_hf_dir(ModelFacts.read(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(model_config()))
    with pytest.raises(ValueError, match=r"no .safetensors files"):
        open_hf_dir(ModelFacts.read(tmp_path))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ValueError, match=r"gone.safetensors, named in .* does not exist"):
        open_hf_dir(ModelFacts.read(tmp_path))


def test_tied_output_weights_in_a_file_are_passed_over(tmp_path):
    path = broken(tmp_path, lambda weights: None)
    (path / "config.json").write_text(json.dumps(model_config(tie_word_embeddings=True)))
    assert "lm_head.weight" not in open_hf_dir(ModelFacts.read(path))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, "0o644"), (0o077, "0o600"), (0o002, "0o664")])
def test_umask_decides_who_may_read_weights(tmp_path: Path, umask: int, mode: str) -> None:
    path = tmp_path / "model.safetensors"
    before = os.umask(umask)
    try:
        for _ in range(2):
            save_tensors({"w": torch.ones(3)}, path)
    finally:
        os.umask(before)
    assert oct(path.stat().st_mode & 0o777) == mode
    assert torch.equal(load_file(path)["w"], torch.ones(3))
