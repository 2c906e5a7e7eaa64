"""The structure of a Megatron checkpoint is checked when it is opened; what is wrong is named."""

import pickle
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
from mcore_rl.weights.megatron_files.metadata import COMMON_OBJECT
from tests.support.hostile_files import dict_with_nested_key, write_zip_bomb
from tests.support.old_checkpoint import unpack_old_checkpoints
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
    others = [item.key for item in checkpoint.items if "_extra_state/shard_" not in item.key]
    assert others == [COMMON_OBJECT]
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
    """Change a byte in the middle of the object that holds what is not sharded."""
    [item] = [i for i in open_torch_dist(folder).items if i.key == COMMON_OBJECT]
    content = bytearray((folder / item.file).read_bytes())
    content[item.start + content[item.start :].index(b"extra")] ^= 1
    (folder / item.file).write_bytes(content)


def drop_common(folder: Path) -> None:
    """Take that object out of .metadata, as if it had never been written."""
    path = folder / ".metadata"
    content = pickle.loads(path.read_bytes())
    del content.state_dict_metadata[COMMON_OBJECT]
    kept = {key: info for key, info in content.storage_data.items() if key.fqn != COMMON_OBJECT}
    content.storage_data = kept
    path.write_bytes(pickle.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, rf"{DATA} has .* bytes, .* should end at byte .* it was truncated"),
        (lengthen, rf"{DATA} has .* bytes, but its items end at byte"),
        (damage_common, rf"{DATA}: 'common_state/shard_0_1' is damaged"),
        (drop_common, r"step has neither common\.pt nor an object 'common_state/shard_0_1'"),
        (lambda f: (f / "common.pt").touch(), "the folder mixes two checkpoints"),
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


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint of megatron-core 0.16, with a common.pt."""
    return unpack_old_checkpoints(tmp_path) / "plain"


def test_an_old_common_file_is_read(old: Path) -> None:
    assert open_torch_dist(old).items and read_common(old)["step"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(b"junk"), r"common\.pt is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-30]), r"common\.pt is damaged"),
        (lambda path: write_zip_bomb(path, 50 << 20), r"common\.pt is damaged: .* is compressed"),
        (Path.unlink, r"plain has neither common\.pt nor an object"),
    ],
)
def test_a_damaged_old_common_file_is_refused(
    old: Path, change: Callable[[Path], object], message: str
) -> None:
    change(old / "common.pt")
    with pytest.raises(ValueError, match=message):
        open_torch_dist(old, use_sums=False)


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


@pytest.mark.slow
def test_a_key_whose_hash_takes_for_ever_is_refused(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "DEADLINE_S", 5.0)
    folder = shutil.copytree(original, tmp_path / "step")
    (folder / ".metadata").write_bytes(dict_with_nested_key())
    with pytest.raises(ValueError, match=r"\.metadata cannot be read within 5 s"):
        open_torch_dist(folder, use_sums=False)
