"""Files travel whole between a node of its own folder and the controller's; damage is noticed."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from mcore_rl.cluster import shared_folder
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.cluster.shared_folder import CHUNK_BYTES, CarriedStorage, FolderKeeper, start_keeper
from mcore_rl.config import ClusterConfig
from mcore_rl.train.storage import make_empty

SIZES = (0, 7, CHUNK_BYTES, 5 * CHUNK_BYTES + 3)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the controller; `here`, a link to it, is what the other node has."""
    return tmp_path_factory.mktemp("controller") / "run"


@pytest.fixture(scope="module")
def keeper(root: Path) -> Iterator[Any]:
    with open_ray_session(ClusterConfig(object_store_mib=160), num_cpus=1):
        yield start_keeper(root)


class ElsewhereKeeper:
    """Stands between a storage and the keeper: paths below `here` are those below `home`."""

    def __init__(self, keeper: Any, here: Path, home: Path) -> None:
        self._keeper, self._here, self._home = keeper, str(here), str(home)

    def __getattr__(self, name: str) -> Any:
        return _Method(getattr(self._keeper, name), self._here, self._home)


class _Method:
    def __init__(self, method: Any, here: str, home: str) -> None:
        self._method, self._here, self._home = method, here, home

    def remote(self, *args: Any) -> Any:
        return self._method.remote(*(self._at_home(arg) for arg in args))

    def _at_home(self, value: Any) -> Any:
        if isinstance(value, str | Path):
            return type(value)(str(value).replace(self._here, self._home))
        return value


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


@pytest.fixture
def storage(keeper: Any, root: Path, here: Path) -> CarriedStorage:
    """Both folders lie on this machine, so names are translated on the way."""
    return CarriedStorage(ElsewhereKeeper(keeper, here, root), timeout_s=60.0)


def test_files_are_brought_and_fetched_byte_by_byte(
    storage: CarriedStorage, root: Path, here: Path
) -> None:
    staging = here / "checkpoints" / "step_1.incomplete"
    storage.run(make_empty, staging)
    storage.prepare(staging)
    contents = {f"part{size}": os.urandom(size) for size in SIZES}
    for name, content in contents.items():
        (staging / name).write_bytes(content)
    first, *_ = contents
    storage.bring(staging / first)
    assert {path.name for path in staging.iterdir()} == contents.keys() - {first}
    storage.bring_rest(staging)
    storage.leave(staging)
    assert not staging.exists()
    there = root / "checkpoints" / "step_1.incomplete"
    assert {path.name: path.read_bytes() for path in there.iterdir()} == contents

    stale = here / "checkpoints" / "step_1.fetched_0000"
    stale.mkdir()
    storage.run(os.rename, there, there.with_name("step_1"))
    fetched = storage.fetch(here / "checkpoints" / "step_1")
    assert {path.name: path.read_bytes() for path in fetched.iterdir()} == contents
    assert storage.fetch(here / "checkpoints" / "step_1") == fetched, "its other ranks find it"
    assert not stale.exists()
    storage.leave(fetched)
    assert not fetched.exists()


def test_a_file_that_is_kept_here_replaces_the_one_there(
    storage: CarriedStorage, root: Path, here: Path
) -> None:
    log = here / "logs" / "trainer_rank0.log"
    log.parent.mkdir(parents=True)
    for text in ("one line\n", "another\n"):
        log.write_text(text)
        storage.copy(log)
        assert (root / "logs" / "trainer_rank0.log").read_text() == log.read_text() == text


def test_a_folder_with_other_files_is_left_alone(storage: CarriedStorage, here: Path) -> None:
    (here / "hf").mkdir(parents=True)
    (here / "hf" / "mine").touch()
    storage.leave(here / "hf")
    assert (here / "hf" / "mine").exists()


def test_errors_there_are_raised_here(
    storage: CarriedStorage, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match="step_9"):
        storage.fetch(here / "checkpoints" / "step_9")
    outside = here.parent / "outside"
    outside.touch()
    with pytest.raises(ValueError, match="outside does not lie in the run folder"):
        storage.copy(outside)
    monkeypatch.setattr(shared_folder.zlib_ng, "crc32", lambda content: 7)
    (here / "file").write_bytes(b"content")
    with pytest.raises(ValueError, match="bytes from 0 on came damaged over the network"):
        storage.copy(here / "file")


def test_a_full_disk_there_is_named_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = FolderKeeper("/dev")
    answer = keeper.write("/dev/full", 7, 0, b"content", shared_folder.zlib_ng.crc32(b"content"))
    assert "cannot write /dev/full: no space left on device" in str(answer)


def test_an_answer_that_does_not_come_is_a_timeout(keeper: Any) -> None:
    storage = CarriedStorage(keeper, timeout_s=0.2)
    with pytest.raises(TimeoutError, match=r"within 0.2 s \(run.call_timeout_s\)"):
        storage.run(_sleep, 2.0)


def _sleep(seconds: float) -> None:
    import time

    time.sleep(seconds)


def test_the_keeper_sits_on_this_node(keeper: Any) -> None:
    node = ray.get(keeper.run.remote(_node_id), timeout=60)
    assert node == ray.get_runtime_context().get_node_id()


def _node_id() -> str:
    return ray.get_runtime_context().get_node_id()
