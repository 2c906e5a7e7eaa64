"""Assemblies become files of a limited size, quantized where asked, with an index that agrees."""

import json
from pathlib import Path

import torch

from checkpoint_tools.assembly import whole
from checkpoint_tools.hf import open_hf
from checkpoint_tools.hf_output import make_hf
from checkpoint_tools.produce import ConversionReport
from mcore_rl.weights.hf.checksums import MANIFEST
from mcore_rl.weights.hf.folder import INDEX, write_index
from tests.support.small_hf import LARGE, ONE_WORKER, read_all, write_hf


def copy(
    source: Path, out: Path, quantized: frozenset[str], max_file_bytes: int
) -> ConversionReport:
    checkpoint = open_hf(source)
    assemblies = {name: whole(t.chunks[0]) for name, t in checkpoint.tensors.items()}
    return make_hf(
        out, [checkpoint], assemblies, quantized, write_index, max_file_bytes, ONE_WORKER
    )


def test_tensors_are_dealt_out_to_files_of_the_size_asked_for(tmp_path: Path) -> None:
    weights = {f"t{i}": torch.full((100,), float(i)) for i in range(6)}
    source = write_hf(tmp_path / "source", weights)
    report = copy(source, tmp_path / "out", frozenset(), max_file_bytes=800)
    assert (report.num_tensors, report.reused_bytes) == (6, 0)
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 6 * 400
    assert index["weight_map"].keys() == weights.keys()
    assert (tmp_path / "out" / MANIFEST).is_file()
    copied = read_all(tmp_path / "out")
    assert all(torch.equal(copied[name], tensor) for name, tensor in weights.items())


def test_a_quantized_matrix_has_its_scales_beside_it_in_the_same_file(tmp_path: Path) -> None:
    weights = {"a.weight": torch.randn(130, 200), "b.weight": torch.randn(4, 4)}
    source = write_hf(tmp_path / "source", weights)
    copy(source, tmp_path / "out", frozenset({"a.weight"}), LARGE)
    tensors = open_hf(tmp_path / "out").tensors
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        "a.weight": ("float8_e4m3fn", (130, 200)),
        "a.weight_scale_inv": ("float32", (2, 2)),
        "b.weight": ("float32", (4, 4)),
    }
