"""Megatron's own checkpoints to HuggingFace and back: nothing is lost, in any family and layout."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoint_tools.cli import main
from mcore_rl.slices.hf.checksums import MANIFEST, read_manifest
from mcore_rl.slices.hf.facts import ModelFacts
from mcore_rl.slices.hf.files import open_hf_dir
from mcore_rl.slices.hf.folder import INDEX
from mcore_rl.slices.hf.quantize import quantize_into
from tests.checkpoint_tools.conftest import LAYOUTS, MTP, write_source
from tests.house.test_documents import commands
from tests.support.policy import read


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def assert_equal(first: Path, second: Path) -> None:
    a, b = read_all(first), read_all(second)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


@pytest.mark.gloo
@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind != "qwen3_moe"])
def test_a_model_goes_through_megatron_and_comes_back(
    saved: Path, tmp_path: Path, command: Any, kind: str
) -> None:
    """from-hf, dist_checkpointing.load, dist_checkpointing.save, to-hf."""
    source = saved / kind / "hf"
    assert command("to-hf", saved / kind / "step", tmp_path / "out", "--source-hf", source) == 0
    assert_equal(tmp_path / "out", source)
    written, original = ModelFacts.read(tmp_path / "out"), ModelFacts.read(source)
    assert open_hf_dir(written).keys() == open_hf_dir(original).keys()
    assert command("verify", saved / kind / "step", saved / kind / "megatron") == 0
    assert command("verify", saved / kind / "megatron", source) == 0


@pytest.mark.gloo
def test_a_trained_model_is_merged_as_the_trainer_exports_it(
    saved: Path, tmp_path: Path, command: Any, capsys: Any
) -> None:
    step, exported, source = saved / "qwen3_moe/step", saved / "exported", saved / "qwen3_moe/hf"
    out = tmp_path / "out"
    assert command("to-hf", step, out, "--source-hf", source, "--max-file-bytes", "200KB") == 0
    assert len(list(out.glob("*.safetensors"))) > 2
    assert_equal(out, exported)
    assert command("verify", out, exported) == 0
    assert command("verify", step, exported) == 0
    capsys.readouterr()
    assert command("verify", step, saved / "qwen3_moe/megatron") == 1
    assert "elements differ, the first at [0" in capsys.readouterr().out
    assert command("verify", step, saved / "qwen3_moe/hf", "--json") == 1
    verdict = json.loads(capsys.readouterr().out)
    assert not verdict["equal"]
    assert len(verdict["differences"]) > 10
    assert len(verdict["crc32"]) == verdict["num_tensors"]


@pytest.mark.gloo
def test_a_critic_is_merged_with_its_value_head(saved: Path, tmp_path: Path, command: Any) -> None:
    source = saved / "qwen3_moe/hf"
    assert command("to-hf", saved / "critic/step", tmp_path / "out", "--source-hf", source) == 0
    assert_equal(tmp_path / "out", saved / "critic/exported")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForSequenceClassification"]
    assert "score.weight" in json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]


@pytest.mark.gloo
def test_what_megatron_does_not_train_is_carried_unchanged(
    saved: Path, tmp_path: Path, command: Any
) -> None:
    source = saved / "deepseek_v3/hf"
    out = tmp_path / "out"
    arguments = ("--source-hf", source, "--dtype", "bfloat16", "--memory-budget", "5MiB")
    assert command("to-hf", saved / "deepseek_v3/step", out, *arguments) == 0
    before, after = read_all(source), read_all(out)
    for name in MTP:
        assert torch.equal(before[name], after[name])
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(before[bias], after[bias]) and after[bias].dtype == torch.float32
    cast = {name: t.to(torch.bfloat16) for name, t in before.items() if not name.endswith("_bias")}
    assert all(torch.equal(after[name], tensor) for name, tensor in cast.items())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.gloo
def test_training_goes_on_from_a_checkpoint_that_went_through_hf_names(
    saved: Path, command: Any
) -> None:
    for straight, resumed in pickle.loads((saved / "resumed.pickle").read_bytes()):
        assert straight == resumed
    names = {name.partition(".")[0] for name in read_all(saved / "adam")}
    assert names == {"param", "exp_avg", "exp_avg_sq"}
    assert command("verify", saved / "resumed", saved / "qwen3_moe/step", "--optimizer") == 0
    assert command("verify", saved / "adam") == 0


@pytest.mark.gloo
def test_the_trainer_writes_checksums_of_every_byte(saved: Path) -> None:
    for folder in (saved / "qwen3_moe/step", saved / "exported", saved / "critic/exported"):
        sums = read_manifest(folder)
        assert sums is not None
        files = {
            path.name: path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST
        }
        assert {name: entry.num_bytes for name, entry in sums.items()} == files
    assert not list(saved.glob("*/*/*.distcp.checksums.json"))


@pytest.mark.gloo
def test_inspect_tells_step_layout_and_shapes(saved: Path, command: Any, capsys: Any) -> None:
    assert command("inspect", saved / "qwen3_moe/step", "--json") == 0
    listing = json.loads(capsys.readouterr().out)
    assert (listing["kind"], listing["step"], listing["layout"]["tp"]) == ("torch_dist", 1, 2)
    fc1 = listing["tensors"]["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert (fc1["shape"], fc1["dtype"]) == ([4, 8, 64, 64], "float32")
    assert listing["checksums"] and "rng/shard_0_2" in listing["objects"]
    assert command("inspect", saved / "exported") == 0
    text = capsys.readouterr().out
    assert "model.layers.3.mlp.experts.7.down_proj.weight" in text
    assert f"bytes: {sum(t.nbytes for t in read_all(saved / 'exported').values())} " in text


def test_eight_bit_values_and_scales_are_those_of_the_trainer(tmp_path: Path, command: Any) -> None:
    source, out = write_source("deepseek_v3", tmp_path / "hf"), tmp_path / "out"
    assert command("to-fp8", source, out, "--memory-budget", "4MiB") == 0
    before, after = read_all(source), read_all(out)
    quantized = [name for name in after if name + "_scale_inv" in after]
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in quantized
    assert MTP[0] not in quantized and MTP[1] in quantized
    for name, tensor in before.items():
        if name not in quantized:
            assert torch.equal(after[name], tensor), name
            continue
        values = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
        scales = torch.empty_like(after[name + "_scale_inv"])
        quantize_into(tensor, values, scales)
        assert torch.equal(after[name].view(torch.uint8), values.view(torch.uint8)), name
        assert torch.equal(after[name + "_scale_inv"], scales), name
    assert (
        json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"]
        == "fp8"
    )
    assert command("verify", out) == 0


def test_changed_on_purpose_then_summed_anew(tmp_path: Path, command: Any, capsys: Any) -> None:
    folder = write_source("qwen2", tmp_path / "hf")
    assert command("verify", folder) == 0
    assert "came without checksums" in capsys.readouterr().out
    assert command("checksums", folder) == 0
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    assert command("verify", folder) == 2
    assert "config.json has" in capsys.readouterr().err
    assert command("checksums", folder) == 0
    assert command("verify", folder) == 0


@pytest.mark.gloo
def test_the_documented_commands_run(saved: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """In their order, each with what the ones before made."""
    monkeypatch.chdir(tmp_path)
    places = {
        "runs/tiny_moe_grpo/checkpoints/step_000050": "qwen3_moe/step",
        "runs/tiny_moe_ppo/checkpoints/critic_000050": "critic/step",
        "runs/warm_start/hf": "qwen3_moe/hf",
        "dense": "qwen3/hf",
    }
    for place, source in places.items():
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        Path(place).symlink_to(saved / source)
    words = [
        found
        for found in commands(read(Path("docs/checkpoints.md")))
        if found[0] == "mcore-rl-ckpt"
    ]
    assert {line[1] for line in words} >= {
        "to-hf",
        "from-hf",
        "to-fp8",
        "dequantize",
        "inspect",
        "verify",
        "checksums",
    }
    for line in words:
        assert main(line[1:]) == 0, line


def test_a_result_is_never_written_over(tmp_path: Path, command: Any, capsys: Any) -> None:
    (tmp_path / "out").mkdir()
    assert command("from-hf", tmp_path, tmp_path / "out") == 2
    assert "out exists: choose another output" in capsys.readouterr().err


def test_tensors_of_mixed_precision_come_out_in_one(tmp_path: Path, command: Any) -> None:
    """Norms in float32 in a model of bfloat16, as some publish them."""
    source = write_source("qwen2", tmp_path / "hf")
    weights = load_file(source / "model.safetensors")
    mixed = {name: t if "norm" in name else t.to(torch.bfloat16) for name, t in weights.items()}
    save_file(mixed, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config))
    assert command("from-hf", source, tmp_path / "megatron") == 0
    assert command("to-hf", tmp_path / "megatron", tmp_path / "out", "--source-hf", source) == 0
    after = read_all(tmp_path / "out")
    assert all(
        torch.equal(after[name], tensor.to(torch.bfloat16)) for name, tensor in mixed.items()
    )
    with safe_open(tmp_path / "out/model-00001-of-00001.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_stacked_experts_are_not_quantized(
    saved: Path, tmp_path: Path, command: Any, capsys: Any
) -> None:
    assert command("to-fp8", saved / "gpt_oss/hf", tmp_path / "out") == 2
    assert "experts that are stacked in one tensor" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
