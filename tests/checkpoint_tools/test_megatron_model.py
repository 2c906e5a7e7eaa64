"""Tensors of the two namings are made of each other; going there and back is the identity."""

from pathlib import Path
from typing import Any

import pytest

from checkpoint_tools.assembly import Assembly
from checkpoint_tools.hf import open_hf
from checkpoint_tools.hf_model import read_config
from checkpoint_tools.megatron_model import (
    extra_state_keys,
    hf_assemblies,
    megatron_assemblies,
    megatron_tensors,
)
from checkpoint_tools.stored import Chunk, StoredTensor
from checkpoint_tools.tiling import check_boxes
from tests.support.assembly_elements import element_pairs
from tests.support.tiny_models import write_model


def element_sources(assembly: Assembly) -> dict[int, tuple[str, int]]:
    """Element of the tensor -> (key of the chunk, element of the chunk)."""
    sources: dict[int, tuple[str, int]] = {}
    for piece in assembly.pieces:
        for target, source in element_pairs(piece):
            sources[target] = (piece.chunk.key, source)
    return sources


@pytest.mark.parametrize("kind", ["qwen3_moe", "llama"])
def test_there_and_back_is_the_identity(tmp_path: Path, kind: str) -> None:
    folder = write_model(kind, tmp_path / "hf")
    config: Any = read_config(folder)
    source = open_hf(folder)
    hf = {name: tensor.chunks[0] for name, tensor in source.tensors.items()}
    wanted = megatron_tensors(config, "bfloat16")
    boxes = megatron_assemblies(wanted, hf, config, folder)

    origins: dict[str, dict[int, tuple[str, int]]] = {}
    chunks: dict[str, list[Chunk]] = {}
    for tensor, offset, made in boxes:
        key = f"{tensor.key} {offset}"
        origins[key] = element_sources(made)
        chunk = Chunk(key, tensor.dtype, offset, made.shape, "file", 0, made.num_bytes, False)
        chunks.setdefault(tensor.key, []).append(chunk)
    stored = [StoredTensor(t.key, t.dtype, t.shape, tuple(chunks[t.key])) for t in wanted]
    for name, made in hf_assemblies(stored, config, None, "here").items():
        back = element_sources(made)
        assert made.shape == source.tensors[name].shape
        first = next(iter(sorted(back)))
        for element in {first, len(back) // 2, len(back) - 1}:
            key, position = back[element]
            assert origins[key][position] == (name, element), name


def test_boxes_tile_their_tensors_and_objects_are_numbered(tmp_path: Path) -> None:
    config: Any = read_config(write_model("qwen3_moe", tmp_path / "hf"))
    for tensor in megatron_tensors(config, "bfloat16"):
        check_boxes(tensor.key, tensor.shape, tensor.boxes, "here")
    keys = extra_state_keys(config)
    assert len(keys) == len(set(keys))
    layers = config["num_hidden_layers"]
    assert f"decoder.layers.self_attention.core_attention._extra_state/shard_0_{layers}" in keys


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "hf")
    config: Any = read_config(folder)
    hf = {name: tensor.chunks[0] for name, tensor in open_hf(folder).tensors.items()}
    del hf["model.norm.weight"]
    with pytest.raises(ValueError, match=r"here lacks 'model\.norm\.weight', by config\.json"):
        megatron_assemblies(megatron_tensors(config, "bfloat16"), hf, config, "here")
    with pytest.raises(ValueError, match=r"here lacks .* tensors, the first is"):
        hf_assemblies([], config, None, "here")
