"""The memory that is free is the machine's or the container's, whichever is less."""

from pathlib import Path

import psutil

from mcore_rl.process.host_memory import count_free_bytes


def write(folder: Path, bound: str) -> Path:
    (folder / "memory.max").write_text(f"{bound}\n")
    (folder / "memory.current").write_text("700000\n")
    (folder / "memory.stat").write_text("anon 5\nactive_file 200000\ninactive_file 50000\n")
    return folder


def test_a_container_has_what_its_bound_leaves_and_what_is_cached(tmp_path: Path) -> None:
    assert count_free_bytes(write(tmp_path, "1000000")) == 1000000 - 700000 + 250000
    assert count_free_bytes(write(tmp_path, "500000")) == 50000
    assert count_free_bytes(write(tmp_path, "100000")) == 0


def test_without_a_bound_it_is_the_machines(tmp_path: Path) -> None:
    free = psutil.virtual_memory().available
    for folder in (write(tmp_path, "max"), tmp_path / "none"):
        assert abs(count_free_bytes(folder) - free) < free / 10
