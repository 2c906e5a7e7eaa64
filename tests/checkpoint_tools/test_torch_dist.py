"""The structure of a Megatron checkpoint is checked when it is opened; what is wrong is named."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint_tools.cli import main
from checkpoint_tools.torch_dist import (
    is_of_optimizer,
    is_torch_dist,
    model_tensors,
    open_torch_dist,
    read_common,
)
from mcore_rl.weights.megatron_files import metadata
from tests.support.hostile_files import dict_with_nested_key, write_zip_bomb
from tests.support.tiny_models import write_model

DATA = "__0_0.distcp"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("torch_dist")
    hf = write_model("llama", root / "hf")
    assert main(["from-hf", str(hf), str(root / "step"), "--workers", "1"]) == 0
    return root / "step"


def test_tensors_objects_and_common_state_are_read(original: Path) -> None:
    assert is_torch_dist(original)
    checkpoint = open_torch_dist(original)
    assert {tensor.key for tensor in model_tensors(checkpoint)} == checkpoint.tensors.keys()
    assert all("_extra_state/shard_" in item.key for item in checkpoint.items)
    assert checkpoint.sums is not None and DATA in checkpoint.sums
    assert read_common(original) == {"step": 0, "extra": {}, "layout": {}}
    assert open_torch_dist(original, use_sums=False).sums is None


def cut(folder: Path) -> None:
    path = folder / DATA
    path.write_bytes(path.read_bytes()[:-10])


def lengthen(folder: Path) -> None:
    path = folder / DATA
    path.write_bytes(path.read_bytes() + b"more")


def damage_common(folder: Path) -> None:
    path = folder / "common.pt"
    path.write_bytes(path.read_bytes()[:-30])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, rf"{DATA} has .* bytes, .* should end at byte .* it was truncated"),
        (lengthen, rf"{DATA} has .* bytes, but its items end at byte"),
        (damage_common, r"common\.pt is damaged"),
        (lambda f: (f / "common.pt").unlink(), r"common\.pt does not exist"),
        (lambda f: (f / ".metadata").unlink(), r"\.metadata does not exist"),
        (lambda f: (f / DATA).unlink(), rf"{DATA} does not exist: it should hold"),
        (
            lambda f: (f / "metadata.json").write_text("{}"),
            "cannot be read, only .* --ckpt-convert-format torch_dist",
        ),
        (lambda f: (f / "metadata.json").write_text("["), r"metadata\.json is damaged"),
    ],
)
def test_a_wrong_structure_is_refused(
    original: Path, tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    folder = shutil.copytree(original, tmp_path / "step")
    change(folder)
    with pytest.raises(ValueError, match=message):
        open_torch_dist(folder, use_sums=False)


def test_a_damaged_common_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "common.pt").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"common\.pt is damaged"):
        read_common(tmp_path)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("optimizer.state.exp_avg.w", True),
        ("chained_1.optimizer.state.param.w", True),
        ("decoder.optimizer.weight", False),
        ("embedding.word_embeddings.weight", False),
    ],
)
def test_keys_of_the_optimizer_are_told_apart(key: str, expected: bool) -> None:
    assert is_of_optimizer(key) is expected


def test_a_common_file_that_unpacks_without_end_is_refused(original: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(original, tmp_path / "step")
    write_zip_bomb(folder / "common.pt", 50 << 20)
    with pytest.raises(ValueError, match=r"common\.pt is damaged: .* is compressed"):
        open_torch_dist(folder, use_sums=False)


def test_a_key_whose_hash_takes_for_ever_is_refused(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "DEADLINE_S", 5.0)
    folder = shutil.copytree(original, tmp_path / "step")
    (folder / ".metadata").write_bytes(dict_with_nested_key())
    with pytest.raises(ValueError, match=r"\.metadata cannot be read within 5 s"):
        open_torch_dist(folder, use_sums=False)
