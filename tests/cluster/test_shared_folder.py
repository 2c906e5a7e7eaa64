"""Nodes that see another run folder are found before anything is built."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cluster import shared_folder
from mcore_rl.cluster.group import RankGroup
from mcore_rl.cluster.placement import reserve
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.cluster.shared_folder import bring_run_files, find_apart
from mcore_rl.config import ClusterConfig
from mcore_rl.planning.bundles import plan_ranks

pytestmark = pytest.mark.e2e


@pytest.fixture
def actors(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with open_ray_session(ClusterConfig(object_store_mib=80), num_cpus=2):
        [slots] = reserve([plan_ranks(2, 0.5, gpus_per_node=0)], timeout_s=20)
        group = RankGroup("trainer", slots, tmp_path / "logs")
        assert group.first_of_nodes() == {}  # a cluster of one node has nobody to compare with
        yield dict(zip(("node7", "node8"), group.actors, strict=True))
        group.kill()


@pytest.mark.slow
def test_a_folder_of_their_own_is_noticed(
    actors: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_apart(tmp_path, actors, 60.0) == set()
    assert find_apart(tmp_path, {}, 60.0) == set()
    monkeypatch.setattr(shared_folder, "VISIBLE_S", 0.5)
    # This path is another folder in each process that has another working directory.
    monkeypatch.chdir(tmp_path)
    assert find_apart(Path("/proc/self/cwd"), actors, 60.0) == {"node7", "node8"}
    assert list(tmp_path.glob(".shared*")) == []


def test_ranks_of_nodes_apart_are_told_and_lost_nodes_are_named(
    actors: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with bring_run_files(tmp_path, actors, 60.0, timeout_s=60.0) as files:
        assert files.find_storage("node7") is None
    monkeypatch.setattr(shared_folder, "find_apart", lambda *_: {"node8"})
    with bring_run_files(tmp_path, actors, 60.0, timeout_s=60.0) as files:
        assert files.find_storage("node7") is None
        storage = files.find_storage("node8")
        assert storage is not None and storage.run(max, 3, 4) == 4
    assert f"run.dir={tmp_path} is not seen on node8: their checkpoints" in caplog.text
    assert f"logs stay in {tmp_path} on node node8: it is lost" in caplog.text
