"""Files of a model directory: which are read, how tensors are dealt out, what is copied."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_tools.opening import open_checkpoint
from mcore_rl.weights.hf.checksums import MANIFEST
from mcore_rl.weights.hf.folder import INDEX, deal_out, list_checkpoint_files, write_small_files


def test_files_are_those_of_the_index_if_there_is_one(tmp_path: Path) -> None:
    for name in ("a", "b", "stale"):
        (tmp_path / f"{name}.safetensors").touch()
    every = [tmp_path / f"{name}.safetensors" for name in ("a", "b", "stale")]
    assert list_checkpoint_files(tmp_path) == every
    weight_map = {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert list_checkpoint_files(tmp_path) == every[:2]
    every[0].unlink()
    with pytest.raises(ValueError, match=rf"a.safetensors, named in {INDEX}, does not exist"):
        list_checkpoint_files(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no .safetensors files"):
        list_checkpoint_files(tmp_path)


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


def test_what_belongs_to_the_model_is_copied_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    out.mkdir()
    kept = {
        "additional_chat_templates/tool_use.jinja": "{{ tools }}",
        "chat_template.jinja": "{{ messages }}",
        "code/modeling.py": "pass",
        "tokenizer.json": "{}",
    }
    left = (
        *("1_Dense/config.json", "1_Dense/vocab.txt", "a.pt", "b.pth", "flax_model.msgpack"),
        *("model-q4.gguf", "model.safetensors", INDEX, "onnx/model.onnx", "pytorch_model.bin"),
        *("pytorch_model.bin.index.json", "step/.metadata", "step/__0_0.distcp"),
        *("tf_model.h5", "tf_model.h5.index.json"),
    )
    hidden = (".git/config", ".cache/huggingface/x")
    old = dict.fromkeys((*left, *hidden, MANIFEST, "config.json"), "old")
    for name, text in {**kept, **old}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    write_small_files(out, {"vocab_size": 3}, {"w": "x.safetensors"}, 12, source)
    made = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert made == {*kept, "config.json", INDEX}
    assert {name: (out / name).read_text() for name in kept} == kept
    shown = sorted({*left} - {"model.safetensors", INDEX, "step/.metadata"})
    assert capsys.readouterr().out == (
        f"copied from {source}: {', '.join(kept)}; left out: {', '.join(shown)}\n"
    )
    assert json.loads((out / "config.json").read_text()) == {"vocab_size": 3}
    index = json.loads((out / INDEX).read_text())
    assert index == {"metadata": {"total_size": 12}, "weight_map": {"w": "x.safetensors"}}


def test_files_get_the_permissions_of_new_files_whatever_the_source_has(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    for folder in (source, out):
        folder.mkdir()
    (source / "tokenizer.json").touch(mode=0o400)
    before = os.umask(0o027)
    try:
        write_small_files(out, {}, {"w": "x.safetensors"}, 12, source)
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in out.iterdir()}
    assert modes == dict.fromkeys(("config.json", "tokenizer.json", INDEX), "0o640")


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", '{"weight_map": {"w": "../other"}}', "{"])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=rf"{INDEX} is damaged: "):
        list_checkpoint_files(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-q4.gguf", "tf_model.h5"])
def test_weights_in_another_format_are_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    message = rf"has no \.safetensors files, only {name}: .*save_pretrained\(<directory>\)"
    with pytest.raises(ValueError, match=message):
        list_checkpoint_files(tmp_path)
    with pytest.raises(ValueError, match=rf"no \.metadata, only {name}: .*save_pretrained"):
        open_checkpoint(tmp_path)
