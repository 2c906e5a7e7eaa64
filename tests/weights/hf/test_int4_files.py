"""Shards are filled from INT4 words and scales, whatever columns they cut."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_rl.weights.box import Box, Shard, contiguous_strides
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.files import load_into
from mcore_rl.weights.hf.opened import open_hf_dir
from tests.support.small_hf import read_all
from tests.support.tiny_kimi_k25 import LANGUAGE, unpack_all, write_int4_kimi_k25_model

EXPERT = LANGUAGE + "model.layers.1.mlp.experts.3.down_proj.weight"
ROUTER = LANGUAGE + "model.layers.1.mlp.gate.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of two files, in which the scales of an expert lie apart from its words."""
    made = write_int4_kimi_k25_model(tmp_path_factory.mktemp("kimi") / "hf")
    weights = load_file(made / "model.safetensors")
    apart = {f"{EXPERT}_scale": weights.pop(f"{EXPERT}_scale")}
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    save_file(apart, made / "scales.safetensors", metadata={"format": "pt"})
    return made


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("start", "stop"),
    [((0, 0), (64, 64)), ((8, 32), (24, 64)), ((5, 3), (6, 41)), ((63, 31), (64, 32))],
)
def test_a_shard_is_filled_with_its_part(
    folder: Path, start: tuple[int, int], stop: tuple[int, int], dtype: str
) -> None:
    box = Box(EXPERT, start, stop)
    local = torch.full(box.shape, 7.0, dtype=getattr(torch, dtype))
    shard = Shard(box, "local", 0, contiguous_strides(box.shape), dtype)
    load_into([shard], {"local": local}, ModelFacts.read(folder))
    whole = unpack_all(read_all(folder))[EXPERT]
    assert torch.equal(local, whole[start[0] : stop[0], start[1] : stop[1]].to(local.dtype))


def test_the_matrices_count_as_those_of_the_table(folder: Path) -> None:
    facts = ModelFacts.read(folder)
    assert facts.packing == "int4"
    file_of = open_hf_dir(facts)
    assert facts.family.shapes(facts.config).keys() < file_of.keys()
    assert file_of[EXPERT].name == "model.safetensors"
    assert file_of[f"{EXPERT}_scale"].name == "scales.safetensors"
    assert f"{ROUTER}_packed" not in file_of


def test_scales_that_are_not_finite_are_told(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    scales = load_file(tmp_path / "scales.safetensors")
    scales[f"{EXPERT}_scale"][2, 1] = float("nan")
    save_file(scales, tmp_path / "scales.safetensors", metadata={"format": "pt"})
    box = Box(EXPERT, (0, 0), (64, 64))
    shard = Shard(box, "local", 0, (64, 1), "float32")
    with pytest.raises(ValueError, match="32 of 4096 values that are not finite"):
        load_into([shard], {"local": torch.zeros(64, 64)}, ModelFacts.read(tmp_path))
