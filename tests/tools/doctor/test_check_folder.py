"""A check's folder begins empty and keeps small files; weights and checkpoints go."""

from pathlib import Path

import pytest

from mcore_rl.tools.doctor.check import (
    FOLDER,
    LARGEST_KEPT_MIB,
    find_own_folder,
    make_empty,
    remove_large_files,
)


def test_what_an_earlier_check_left_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "logs" / "run_GRPO"
    make_empty(folder)
    monkeypatch.setenv(FOLDER, str(folder))
    (find_own_folder() / "run").mkdir()
    (find_own_folder() / "run" / "metrics.jsonl").write_text("{}")
    make_empty(folder)
    assert find_own_folder().is_dir() and not list(find_own_folder().iterdir())


def test_large_files_are_removed_and_named(tmp_path: Path) -> None:
    more = {"run/logs/controller.log": 9, "saved/__0_0.distcp": 1, "hf/model.safetensors": 0}
    for name, num_bytes in more.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate((LARGEST_KEPT_MIB << 20) + num_bytes)
    outside = tmp_path.parent / "outside"
    with outside.open("wb") as file:
        file.truncate((LARGEST_KEPT_MIB << 20) + 1)
    (tmp_path / "link").symlink_to(outside)
    assert remove_large_files(tmp_path) == ["saved/__0_0.distcp"]
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"run/logs/controller.log", "hf/model.safetensors", "link"}
    assert outside.exists()
