"""Finds nodes that do not see the run folder, and brings their files into the run folder.

Such a node first writes into a folder of its own. From there, files go to the controller's node:
parts of checkpoints and exports as they are written, logs and profiles at the end of the run.
Files travel in chunks with checksums, as calls of an actor on the controller's node.
"""

import logging
import os
import secrets
import shutil
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from zlib_ng import zlib_ng

from mcore_rl.cluster.nodes import list_alive_nodes
from mcore_rl.process.disk import DiskFullError, report_full_disk
from mcore_rl.process.file_lock import hold_lock

T = TypeVar("T")
CHUNK_BYTES = 16 << 20
CHUNKS_AHEAD = 4
"""Chunks of a file in flight at once."""
THREADS = 8
FETCHED = ".fetched_"


_log = logging.getLogger(__name__)
BROUGHT = ("logs", "profile")
LOGS_TIMEOUT_S = 60.0
CLOCKS_DIFFER_S = 600.0
"""The most by which the clocks of nodes may differ."""
VISIBLE_S = 20.0
"""How long a network filesystem may take to show a new file on another node."""
POLL_S = 0.2


class FolderKeeper:
    """Reads and writes files below `root`, the run folder, for other nodes.

    Methods return errors and do not raise them, since Ray would hide them in a traceback.
    """

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def write(
        self, path: str, num_bytes: int, offset: int, content: bytes, crc32: int
    ) -> Exception | None:
        """Write a chunk of a file of `num_bytes`; chunks may come in any order."""
        with _return_expected() as answer:
            target = self._check_inside(path)
            _check(path, offset, content, crc32)
            with report_full_disk(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                with open(os.open(target, os.O_CREAT | os.O_WRONLY, 0o666), "wb") as file:
                    file.seek(offset)
                    file.write(content)
                    file.truncate(num_bytes)
        return answer.error

    def read(self, path: str, offset: int) -> tuple[bytes, int] | Exception:
        """Return a chunk of a file and its CRC-32."""
        with _return_expected() as answer:
            with self._check_inside(path).open("rb") as file:
                file.seek(offset)
                content = file.read(CHUNK_BYTES)
            return content, zlib_ng.crc32(content)
        assert answer.error is not None
        return answer.error

    def sizes(self, folder: str) -> dict[str, int] | Exception:
        """Return the bytes of each file of a folder, by name."""
        with _return_expected() as answer:
            files = (path for path in self._check_inside(folder).iterdir() if path.is_file())
            return {path.name: path.stat().st_size for path in files}
        assert answer.error is not None
        return answer.error

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function here."""
        with _return_expected() as answer:
            return function(*args)
        return answer.error

    def _check_inside(self, path: str) -> Path:
        if not Path(path).resolve().is_relative_to(self._root.resolve()):
            raise ValueError(f"{path} does not lie in the run folder {self._root}")
        return Path(path)


def _list_offsets(num_bytes: int) -> range:
    """Return the offsets of a file's chunks; an empty file has one chunk."""
    return range(0, max(num_bytes, 1), CHUNK_BYTES)


def _check(path: str, offset: int, content: bytes, crc32: int) -> None:
    if zlib_ng.crc32(content) != crc32:
        raise ValueError(f"{path}: bytes from {offset} on came damaged over the network")


class _Answer:
    error: Exception | None = None


@contextmanager
def _return_expected() -> Iterator[_Answer]:
    """Put an expected error of the block into the yielded answer."""
    answer = _Answer()
    try:
        yield answer
    except (OSError, ValueError, DiskFullError) as error:
        answer.error = error


def start_keeper(root: Path) -> Any:
    """Return the handle of a new FolderKeeper on this node, for the run folder `root`."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    make_remote: Any = ray.remote(FolderKeeper)
    options = make_remote.options(num_cpus=0, max_concurrency=THREADS, scheduling_strategy=here)
    return options.remote(str(root))


class CarriedStorage:
    """A run folder that only the controller's node has; implements train.storage.Storage.

    Files have the same paths here as on the controller's node.
    """

    def __init__(self, keeper: Any, timeout_s: float) -> None:
        """`timeout_s` bounds the transfer of each chunk, and each call of `run`."""
        self._keeper = keeper
        self._timeout_s = timeout_s
        self._suffix = FETCHED + secrets.token_hex(4)

    def prepare(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)

    def bring(self, *files: Path) -> None:
        for file in files:
            self.copy(file)
            file.unlink()

    def copy(self, file: Path) -> None:
        """Copy a file to the controller's node."""
        num_bytes = file.stat().st_size
        with file.open("rb") as source:
            chunks = (
                (at, source.read(min(CHUNK_BYTES, num_bytes - at)))
                for at in _list_offsets(num_bytes)
            )
            write = self._keeper.write.remote
            for _ in self._answers(
                write(str(file), num_bytes, at, content, zlib_ng.crc32(content))
                for at, content in chunks
            ):
                pass

    def bring_rest(self, folder: Path) -> None:
        self.bring(*(path for path in sorted(folder.iterdir()) if path.is_file()))

    def leave(self, folder: Path) -> None:
        if folder.name.endswith(self._suffix):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            with suppress(OSError):
                folder.rmdir()

    def fetch(self, folder: Path) -> Path:
        """Return a copy of the folder, which one rank of the node fetches while the others wait."""
        here = folder.with_name(folder.name + self._suffix)
        here.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(here.with_name(folder.name + ".fetching"), self._timeout_s):
            if not here.exists():
                for stale in here.parent.glob(f"{folder.name}{FETCHED}*"):
                    shutil.rmtree(stale, ignore_errors=True)
                partial = here.with_name(here.name + ".part")
                partial.mkdir()
                sizes = self._answer(self._keeper.sizes.remote(str(folder)))
                for name, num_bytes in sizes.items():
                    self._fetch_file(folder / name, partial / name, num_bytes)
                partial.rename(here)
        return here

    def _fetch_file(self, path: Path, target: Path, num_bytes: int) -> None:
        read = self._keeper.read.remote
        with report_full_disk(target), target.open("wb") as file:
            for content, crc32 in self._answers(
                read(str(path), at) for at in _list_offsets(num_bytes)
            ):
                _check(str(path), file.tell(), content, crc32)
                file.write(content)
            if file.tell() != num_bytes:
                raise ValueError(f"{path}: {file.tell()} of {num_bytes} bytes came")

    def run(self, function: Callable[..., T], *args: Any) -> T:
        return self._answer(self._keeper.run.remote(function, *args))

    def _answers(self, refs: Iterator[Any]) -> Iterator[Any]:
        """Yield the answers of calls in order, with a few calls in flight."""
        under_way = deque(islice(refs, CHUNKS_AHEAD))
        while under_way:
            yield self._answer(under_way.popleft())
            under_way.extend(islice(refs, 1))

    def _answer(self, ref: Any) -> Any:
        """Return the keeper's answer, or raise it if it is an error; TimeoutError if it is late."""
        try:
            answer = ray.get(ref, timeout=self._timeout_s)
        except GetTimeoutError:
            raise TimeoutError(
                f"the controller's node did not take or give a part of a file of the run folder"
                f" within {self._timeout_s:g} s (run.call_timeout_s)"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer


class RunFiles:
    """The run folder and the nodes `apart`, by name, that do not see it."""

    def __init__(self, folder: Path, apart: Collection[str], timeout_s: float) -> None:
        """`timeout_s` bounds the transfer of each chunk."""
        self._folder = folder
        self._apart = apart
        self._began_s = time.time() - CLOCKS_DIFFER_S
        if apart:
            self._storage = CarriedStorage(start_keeper(folder), timeout_s)

    def find_storage(self, node: str) -> CarriedStorage | None:
        """Return the storage for the ranks of a node; None if they see the folder."""
        return self._storage if node in self._apart else None

    def bring_logs(self, timeout_s: float = LOGS_TIMEOUT_S) -> None:
        """Bring the logs and profiles that the nodes apart wrote since the start.

        A warning names nodes that are lost or too slow.
        """
        nodes = {node.name: node.id for node in list_alive_nodes() if node.name in self._apart}
        refs = {name: self._bring_from(node_id) for name, node_id in nodes.items()}
        until_s = time.monotonic() + timeout_s
        for name in sorted(self._apart):
            try:
                if name not in refs:
                    raise ValueError("it is lost")
                ray.get(refs[name], timeout=max(until_s - time.monotonic(), 0.0))
            except (RayError, OSError, ValueError) as error:
                reason = str(error).strip().splitlines()[-1]
                _log.warning("logs stay in %s on node %s: %s", self._folder, name, reason)

    def _bring_from(self, node_id: str) -> Any:
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        make_remote: Any = ray.remote(_bring_written)
        options = make_remote.options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        return options.remote(self._storage, self._folder, self._began_s)


@contextmanager
def bring_run_files(
    folder: Path, actors: Mapping[str, Any], deadline_s: float, timeout_s: float
) -> Iterator[RunFiles]:
    """Find the nodes that do not see the run folder; bring their logs when the block ends.

    A rank of each node must read a file that this process writes, and this process must see the
    answer. `actors` has a RankActor by node. `deadline_s` bounds the wait for the actors'
    processes; later waits report a process that does not start. `timeout_s`: see RunFiles.
    """
    apart = find_apart(folder, actors, deadline_s)
    if apart:
        _log.warning(
            "run.dir=%s is not seen on %s: their checkpoints, exports and logs are brought to this"
            " node, which storage that all nodes share would make needless",
            *(folder, ", ".join(sorted(apart))),
        )
    files = RunFiles(folder, apart, timeout_s)
    may_call_ray = True
    try:
        yield files
    except SystemExit:
        may_call_ray = False  # Ray may be lost, and calls would hang.
        raise
    finally:
        if apart and may_call_ray:
            files.bring_logs()


def find_apart(folder: Path, actors: Mapping[str, Any], deadline_s: float) -> set[str]:
    """Return the names of the nodes that see another `folder`; see `bring_run_files`."""
    if not actors:
        return set()
    token = secrets.token_hex(8)
    mark = folder / f".shared_{token}"
    with report_full_disk(mark):
        mark.write_text(token)
    try:
        return _find_apart(actors, mark, token, deadline_s)
    finally:
        for file in folder.glob(f"{mark.name}*"):
            file.unlink(missing_ok=True)


def _find_apart(actors: Mapping[str, Any], mark: Path, token: str, deadline_s: float) -> set[str]:
    """Return the names of the nodes that see another folder."""
    refs = [actor.answer_mark.remote(str(mark), VISIBLE_S) for actor in actors.values()]
    try:
        found = ray.get(refs, timeout=deadline_s + VISIBLE_S)
    except RayError:
        return set()
    answers = dict(zip(actors, found, strict=True))
    apart = {node for node, answer in answers.items() if answer is None or answer[0] != token}
    until_s = time.monotonic() + VISIBLE_S
    for node, answer in answers.items():
        if node in apart:
            continue
        written = Path(answer[1])
        while not written.exists() and time.monotonic() < until_s:
            time.sleep(POLL_S)
        if not written.exists():
            apart.add(node)
    return apart


def _bring_written(storage: CarriedStorage, folder: Path, since_s: float) -> None:
    """Bring the logs and profiles in this node's `folder` that are newer than `since_s`."""
    for name in BROUGHT:
        for path in sorted((folder / name).rglob("*")):
            if path.is_file() and path.stat().st_mtime >= since_s:
                storage.copy(path)
