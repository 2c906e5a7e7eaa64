"""Files of a model directory: which are read, how tensors are dealt out, what is copied."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.slices.hf.checksums import MANIFEST
from mcore_rl.slices.hf.folder import INDEX, checkpoint_files, deal_out, write_small_files


def test_files_are_those_of_the_index_if_there_is_one(tmp_path: Path) -> None:
    for name in ("a", "b", "stale"):
        (tmp_path / f"{name}.safetensors").touch()
    every = [tmp_path / f"{name}.safetensors" for name in ("a", "b", "stale")]
    assert checkpoint_files(tmp_path) == every
    weight_map = {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert checkpoint_files(tmp_path) == every[:2]
    every[0].unlink()
    with pytest.raises(ValueError, match=rf"a.safetensors, named in {INDEX}, does not exist"):
        checkpoint_files(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no .safetensors files"):
        checkpoint_files(tmp_path)


@given(
    st.dictionaries(st.text(max_size=3), st.integers(1, 1000), min_size=1, max_size=20),
    st.integers(1, 6),
)
def test_every_tensor_is_dealt_out_once_and_evenly(sizes: dict[str, int], num_files: int) -> None:
    files = deal_out(sizes, num_files)
    assert len(files) == num_files
    assert sorted(name for names in files for name in names) == sorted(sizes)
    loads = [sum(sizes[name] for name in names) for names in files]
    assert max(loads) - min(loads) <= max(sizes.values())


def test_tensors_are_dealt_out_the_same_way_in_any_order() -> None:
    sizes = {"a": 3, "b": 3, "c": 2, "d": 1}
    assert deal_out(sizes, 2) == deal_out(dict(reversed(sizes.items())), 2)


def test_side_files_are_copied_and_weights_are_not(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    kept = {"tokenizer.json": "{}", "chat_template.jinja": "{{ messages }}"}
    left = ("model.safetensors", INDEX, "pytorch_model.bin", "a.pt", "b.pth", MANIFEST)
    for name, text in {**kept, **dict.fromkeys(left, "old"), "config.json": "old"}.items():
        (source / name).write_text(text)
    (source / "folder").mkdir()
    write_small_files(out, {"vocab_size": 3}, {"w": "x.safetensors"}, 12, source)
    assert {path.name for path in out.iterdir()} == {*kept, "config.json", INDEX}
    assert {name: (out / name).read_text() for name in kept} == kept
    assert json.loads((out / "config.json").read_text()) == {"vocab_size": 3}
    index = json.loads((out / INDEX).read_text())
    assert index == {"metadata": {"total_size": 12}, "weight_map": {"w": "x.safetensors"}}
