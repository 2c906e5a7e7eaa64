"""Finds the nodes that do not see the run folder, and has their files brought to it.

Nodes with a folder of their own write into it first; what counts comes to the controller's node:
parts of checkpoints and exports as they are written, logs and profiles at the end of the run.
"""

import logging
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mcore_rl.cluster.folder_keeper import CarriedStorage, start_keeper
from mcore_rl.cluster.nodes import alive_nodes
from mcore_rl.process.disk import report_full_disk

_log = logging.getLogger(__name__)
BROUGHT = ("logs", "profile")
LOGS_TIMEOUT_S = 60.0
CLOCKS_DIFFER_S = 600.0
"""By how much the clocks of nodes may differ."""
VISIBLE_S = 20.0
"""How long a network filesystem may take to show a new file on another node."""
POLL_S = 0.2


class RunFiles:
    """The run folder and the nodes `apart`, by name, that do not see it."""

    def __init__(self, folder: Path, apart: Collection[str], timeout_s: float) -> None:
        """`timeout_s` is for each part of a file that travels."""
        self._folder = folder
        self._apart = apart
        self._began_s = time.time() - CLOCKS_DIFFER_S
        if apart:
            self._storage = CarriedStorage(start_keeper(folder), timeout_s)

    def storage_of(self, node: str) -> CarriedStorage | None:
        """Return how the ranks of a node bring their files here; None if they see the folder."""
        return self._storage if node in self._apart else None

    def bring_logs(self, timeout_s: float = LOGS_TIMEOUT_S) -> None:
        """Bring the logs and profiles that were written on the nodes apart since the start.

        A node that is lost, or too slow, is named in the log.
        """
        nodes = {node.name: node.id for node in alive_nodes() if node.name in self._apart}
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
def run_files(
    folder: Path, actors: Mapping[str, Any], deadline_s: float, timeout_s: float
) -> Iterator[RunFiles]:
    """Find the nodes that do not see the run folder; bring their logs when the block ends.

    A rank of each node reads a file that is written here, and writes one that must show here.
    `actors` has their RankActors by node. `deadline_s` bounds the wait for their processes; one
    that does not come up is left to those who wait for its start. `timeout_s`: see RunFiles.
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
        may_call_ray = False  # it may be lost, and calls would hang
        raise
    finally:
        if apart and may_call_ray:
            files.bring_logs()


def find_apart(folder: Path, actors: Mapping[str, Any], deadline_s: float) -> set[str]:
    """Return the names of the nodes whose `folder` is not that of this process; see `run_files`."""
    if not actors:
        return set()
    token = secrets.token_hex(8)
    mark = folder / f".shared_{token}"
    with report_full_disk(mark):
        mark.write_text(token)
    try:
        return _apart(actors, mark, token, deadline_s)
    finally:
        for file in folder.glob(f"{mark.name}*"):
            file.unlink(missing_ok=True)


def _apart(actors: Mapping[str, Any], mark: Path, token: str, deadline_s: float) -> set[str]:
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
    """Bring what was written to the logs and profiles of this node's `folder` since then."""
    for name in BROUGHT:
        for path in sorted((folder / name).rglob("*")):
            if path.is_file() and path.stat().st_mtime >= since_s:
                storage.copy(path)
