"""Cgroups are found and filled in for both versions, and left alone where they are not ours."""

import os
from pathlib import Path

import pytest

from mcore_rl.services.sandbox.cgroups import make_cgroup


def folder(root: Path, of_self: str, *paths: str) -> Path:
    """Lay out a mount of cgroups with this process's list."""
    for path in paths:
        (root / path).mkdir(parents=True)
    (root / "of_self").write_text(of_self)
    return root / "of_self"


def test_version_1_has_a_folder_per_controller(tmp_path: Path) -> None:
    of_self = folder(
        tmp_path, "4:memory:/mine\n8:pids:/\n1:cpu:/\n0::/\n", "memory/mine", "pids", "cpu"
    )
    cgroup = make_cgroup(tmp_path, of_self)
    assert cgroup is not None
    cgroup.set_limits(1 << 20, 9, 0.5)
    name = f"mcore_rl_sandbox_{os.getpid()}_"
    assert (
        sorted(Path(path).parent.name.startswith(name) for path in cgroup.join_paths) == [True] * 3
    )
    (memory,) = (tmp_path / "memory/mine").iterdir()
    (pids,) = (tmp_path / "pids").iterdir()
    (cpu,) = (tmp_path / "cpu").iterdir()
    assert (memory / "memory.limit_in_bytes").read_text() == str(1 << 20)
    assert (pids / "pids.max").read_text() == "9"
    assert (cpu / "cpu.cfs_quota_us").read_text() == "50000"
    (memory / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert cgroup.num_memory_kills() == 3


def test_version_2_has_one_folder(tmp_path: Path) -> None:
    of_self = folder(tmp_path, "0::/mine\n", "mine")
    (tmp_path / "mine/cgroup.controllers").write_text("cpuset cpu memory pids\n")
    cgroup = make_cgroup(tmp_path, of_self)
    assert cgroup is not None
    (made,) = (path for path in (tmp_path / "mine").iterdir() if path.is_dir())
    cgroup.set_limits(1 << 20, 9, 2.0)
    assert cgroup.join_paths == [str(made / "cgroup.procs")]
    assert (made / "memory.max").read_text() == str(1 << 20)
    assert (made / "cpu.max").read_text() == "200000 100000"
    assert (tmp_path / "mine/cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    (made / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    assert cgroup.num_memory_kills() == 1


def test_version_2_asks_for_no_controller_that_is_not_there(tmp_path: Path) -> None:
    of_self = folder(tmp_path, "0::/mine\n", "mine")
    (tmp_path / "mine/cgroup.controllers").write_text("memory pids\n")
    assert make_cgroup(tmp_path, of_self) is not None
    assert (tmp_path / "mine/cgroup.subtree_control").read_text() == "+memory +pids"


def test_a_caller_that_has_moved_below_still_makes_cgroups_above(tmp_path: Path) -> None:
    of_self = folder(tmp_path, "0::/mine/mcore_rl_caller_1\n", "mine/mcore_rl_caller_1")
    (tmp_path / "mine/mcore_rl_caller_1/cgroup.controllers").write_text("cpu memory pids\n")
    cgroup = make_cgroup(tmp_path, of_self)
    assert cgroup is not None
    assert Path(cgroup.join_paths[0]).parents[1] == tmp_path / "mine"


@pytest.mark.parametrize("of_self", ["", "0::/\n", "4:memory:/\n"])
def test_without_both_controllers_there_is_none(of_self: str, tmp_path: Path) -> None:
    assert make_cgroup(tmp_path, folder(tmp_path, of_self, "memory")) is None


def test_a_folder_that_refuses_gives_none(tmp_path: Path) -> None:
    of_self = folder(tmp_path, "0::/mine\n", "mine", "mine/cgroup.subtree_control")
    (tmp_path / "mine/cgroup.controllers").write_text("memory pids cpu\n")
    assert make_cgroup(tmp_path, of_self) is None


def test_folders_of_makers_that_ended_are_removed(tmp_path: Path) -> None:
    of_self = folder(
        tmp_path, "4:memory:/\n8:pids:/\n", "memory/mcore_rl_sandbox_999999999_0", "pids"
    )
    assert make_cgroup(tmp_path, of_self) is not None
    assert not (tmp_path / "memory/mcore_rl_sandbox_999999999_0").exists()
