"""Checks that all nodes of a run see the same run folder, before any model is built."""

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

VISIBLE_S = 20.0
"""How long a network filesystem may take to show a new file on another node."""
POLL_S = 0.2


def check_shared(folder: Path, actors: Mapping[str, Any], deadline_s: float) -> None:
    """Raise ValueError naming the nodes whose files in `folder` are not those of this process.

    A rank of each node reads a file that is written here, and writes one that must show here.
    `actors` has their RankActors by node. `deadline_s` bounds the wait for their processes; one
    that does not come up is left to those who wait for its start.
    """
    if not actors:
        return
    token = secrets.token_hex(8)
    mark = folder / f".shared_{token}"
    mark.write_text(token)
    try:
        apart = _apart(actors, mark, token, deadline_s)
    finally:
        for file in folder.glob(f"{mark.name}*"):
            file.unlink(missing_ok=True)
    if apart:
        raise ValueError(
            f"run.dir={folder}: what this process writes there is not seen on"
            f" {', '.join(sorted(apart))}; every node writes its logs and its part of each"
            " checkpoint into the run folder, so choose one on storage that all nodes share"
        )


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
