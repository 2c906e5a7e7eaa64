"""Shards are filled from FP8 values and the scales of their blocks, whatever blocks they cut."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint_tools.cli import main
from mcore_rl.weights.box import Box, Shard, contiguous_strides
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.files import list_carried_tensors, load_into, write_carried
from mcore_rl.weights.hf.folder import TEMPORARY
from mcore_rl.weights.hf.opened import list_packed, open_hf_dir
from tests.support.fp8_oracle import dequantize
from tests.support.small_hf import read_all
from tests.support.tiny_models import write_model

MATRIX = "model.layers.0.mlp.up_proj.weight"
SCALES = f"{MATRIX}_scale_inv"
ROUTER = "model.layers.1.mlp.gate.weight"
CARRIED = "model.layers.4.mlp.up_proj.weight"
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 of partial blocks, with a layer that predicts, and scales in a second file."""
    root = tmp_path_factory.mktemp("fp8")
    sizes = {"hidden_size": 192, "intermediate_size": 300, "num_nextn_predict_layers": 1}
    whole = write_model("deepseek_v3", root / "whole", **sizes)
    weights = load_file(whole / "model.safetensors")
    copied = {name for name in weights if name.startswith("model.layers.0.")}
    weights |= {name.replace(".0.", ".4.", 1): weights[name].clone() for name in copied}
    save_file(weights, whole / "model.safetensors", metadata={"format": "pt"})
    made = root / "fp8"
    assert main(["to-fp8", str(whole), str(made), "--workers", "1"]) == 0
    (made / "checksums.json").unlink()
    (made / "model.safetensors.index.json").unlink()
    return made


def change(folder: Path, out: Path, edit: Callable[[Weights], object]) -> ModelFacts:
    weights = read_all(folder)
    edit(weights)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text((folder / "config.json").read_text())
    return ModelFacts.read(out)


def fill(facts: ModelFacts, box: Box, dtype: str = "float32") -> Tensor:
    local = torch.full(box.shape, 7.0, dtype=getattr(torch, dtype))
    shard = Shard(box, "local", 0, contiguous_strides(box.shape), dtype)
    load_into([shard], {"local": local}, facts)
    return local


@pytest.mark.parametrize("scales", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_shard_is_filled_with_its_part(
    folder: Path, tmp_path: Path, dtype: str, scales: str
) -> None:
    """Rounded once to bfloat16, as mcore-rl-ckpt dequantize does it."""

    def cast(weights: Weights) -> None:
        weights[SCALES] = weights[SCALES].to(getattr(torch, scales))

    facts = change(folder, tmp_path, cast)
    found = read_all(tmp_path)
    whole = dequantize(found[MATRIX], found[SCALES].float()).to(torch.bfloat16)
    ends = [((0, 0), (300, 192)), ((128, 0), (256, 128)), ((3, 100), (131, 190))]
    for start, stop in [*ends, ((257, 129), (258, 130)), ((120, 127), (140, 129))]:
        local = fill(facts, Box(MATRIX, start, stop), dtype)
        want = whole[start[0] : stop[0], start[1] : stop[1]]
        assert torch.equal(local, want.to(local.dtype)), (start, stop)


def test_the_matrices_count_as_those_of_the_table(folder: Path) -> None:
    facts = ModelFacts.read(folder)
    assert facts.packing == "fp8" and "quantization_config" not in facts.config
    file_of = open_hf_dir(facts)
    shapes = facts.family.shapes(facts.config)
    packed = list_packed(facts.packing, file_of)
    assert shapes.keys() <= file_of.keys() and SCALES in file_of
    assert packed == {name for name in shapes if "_proj" in name}
    assert ROUTER not in packed and MATRIX in packed


FAULTS: dict[str, Callable[[Weights], object]] = {
    rf"lacks 1 of \d+ tensors, the first is '{SCALES}'": lambda w: w.pop(SCALES),
    rf"'{SCALES}' has shape \(3, 3\), .* \(3, 2\)": lambda w: w.update({SCALES: torch.ones(3, 3)}),
    rf"'{SCALES}' is U8: scales .* mcore-rl-ckpt dequantize": lambda w: w.update(
        {SCALES: torch.ones(3, 2, dtype=torch.uint8)}
    ),
    rf"'{SCALES}' holds scales of '{MATRIX}', which is not in 8-bit": lambda w: w.update(
        {MATRIX: torch.ones(300, 192)}
    ),
    "8192 of 57600 values that are not finite": lambda w: w[SCALES][1, 1].fill_(torch.nan),
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults_are_named(folder: Path, tmp_path: Path, message: str) -> None:
    facts = change(folder, tmp_path, FAULTS[message])
    with pytest.raises(ValueError, match=message):
        fill(facts, Box(MATRIX, (0, 0), (300, 192)))


def test_other_blocks_and_other_models_are_refused_with_the_remedy(
    folder: Path, tmp_path: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    for other in ({"weight_block_size": [64, 64]}, {"fmt": "e5m2"}):
        quantization = config["quantization_config"] | other
        text = json.dumps(config | {"quantization_config": quantization})
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"is quantized .* mcore-rl-ckpt dequantize"):
            ModelFacts.read(tmp_path)


def test_carried_matrices_are_decoded(folder: Path, tmp_path: Path) -> None:
    config = ModelFacts.read(folder).config
    assert f"{CARRIED}_scale_inv" not in list_carried_tensors(folder, config)
    [written] = write_carried(folder, tmp_path, config)
    found, source = load_file(tmp_path / (written.filename + TEMPORARY)), read_all(folder)
    want = dequantize(source[CARRIED], source[f"{CARRIED}_scale_inv"]).to(torch.bfloat16)
    assert torch.equal(found[CARRIED], want)
    assert not any(name.endswith("_scale_inv") for name in found)
    norm = CARRIED.replace("mlp.up_proj", "input_layernorm")
    assert torch.equal(found[norm], source[norm])
