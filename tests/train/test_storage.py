"""Where a rank sees the run folder nothing is moved; a checkpoint gets its name with its sums."""

import os
from pathlib import Path

import pytest

from mcore_rl.train.storage import FILE_MANIFEST, SHARED, commit_checkpoint, make_empty
from mcore_rl.weights.hf.checksums import read_manifest, sum_file, write_manifest


def test_a_shared_folder_is_used_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "part"
    file.write_bytes(b"weights")
    SHARED.prepare(tmp_path)
    SHARED.bring(file)
    SHARED.bring_rest(tmp_path)
    assert SHARED.fetch(tmp_path) == tmp_path
    SHARED.leave(tmp_path)
    assert file.read_bytes() == b"weights"
    assert SHARED.run(max, 3, 4) == 4


def test_a_checkpoint_gets_one_manifest_and_its_name(tmp_path: Path) -> None:
    staging, folder = tmp_path / "step_1.incomplete", tmp_path / "step_1"
    make_empty(staging)
    (staging / "stale").touch()
    make_empty(staging)
    make_empty(folder)
    (folder / "former").touch()
    for name in ("a.distcp", "b.distcp"):
        (staging / name).write_text(name)
        sums = {name: sum_file(staging / name, [3])}
        write_manifest(staging, sums, name + FILE_MANIFEST)
    (staging / "common.pt").write_text("small")

    commit_checkpoint(staging, folder)
    assert not staging.exists()
    names = {path.name for path in folder.iterdir()}
    assert names == {"a.distcp", "b.distcp", "common.pt", "checksums.json"}
    sums = read_manifest(folder)
    assert sums is not None and sums["a.distcp"] == sum_file(folder / "a.distcp", [3])
    assert sums["common.pt"].num_bytes == 5


def test_a_save_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and folder are forced to the disk, then comes the rename, then the folder above."""
    events: list[str] = []
    force, rename = os.fsync, Path.rename

    def note_force(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        force(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        events.append(f"{path.name} -> {target.name}")
        return rename(path, target)

    staging = tmp_path / "step_1.incomplete"
    make_empty(staging)
    make_empty(tmp_path / "step_1")
    (staging / "common.pt").write_text("small")
    monkeypatch.setattr(os, "fsync", note_force)
    monkeypatch.setattr(Path, "rename", note_rename)
    commit_checkpoint(staging, tmp_path / "step_1")
    assert events == [
        *("checksums.json.part", "checksums.json.part -> checksums.json"),
        *("common.pt", "checksums.json", "step_1.incomplete"),
        "step_1 -> step_1.deleted",
        "step_1.incomplete -> step_1",
        tmp_path.name,
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
