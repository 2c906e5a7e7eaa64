"""Keeps finished samples that no step has taken beside a checkpoint, for a run that is resumed.

    a save of step k: stores --> kept_samples/step_k/store_*.pickle
                      scores and places --> groups.pickle, then list.json, which names all files
    a resume after k: prompts that come again and are there --> finished groups, not begun ones

They are samples of weights up to k, as those of the checkpoint. All that fails here costs samples,
which are then drawn again, and never the run.
"""

import hashlib
import json
import logging
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from mcore_rl import __version__
from mcore_rl.batches.group_files import GroupFile, read_plain, write_plain
from mcore_rl.cluster.answers import RankError
from mcore_rl.process.disk import UnwritableError, report_unwritable, write_whole
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.run.roles.finished_groups import SampleGroup
from mcore_rl.types import GroupLease, StoredSample
from mcore_rl.types.scores import Scores

_log = logging.getLogger(__name__)
NUM_KEPT = 2
"""Samples of the newest checkpoint, and of the one before, to which a damaged one leads back."""
OF_SAMPLES = ("model", "rollout", "reward", "algorithm", "agents", "data", "drift")
"""Sections of a recipe on which samples and their scores depend."""
_LIST, _GROUPS = "list.json", "groups.pickle"


class GroupStores(Protocol):
    """The stores of a run's samples; see run.rollouts.Rollouts."""

    async def write_groups(
        self, folder: Path, leases: Sequence[GroupLease]
    ) -> Mapping[int, GroupFile]:
        """Write groups to files in a folder; return the file of each store."""
        ...

    async def read_groups(
        self, folder: Path, file: GroupFile, numbers: Sequence[int]
    ) -> Mapping[int, GroupLease]:
        """Take groups of a file into a store; return where they are now, by their old numbers."""
        ...


@dataclass(frozen=True)
class FinishedGroup:
    """The samples of a prompt and their scores."""

    samples: Sequence[StoredSample]
    scores: Scores


def describe_recipe(config: Mapping[str, Any]) -> str:
    """Return a digest of what samples depend on; `config` is a recipe as plain values."""
    sections = {name: config.get(name) for name in OF_SAMPLES}
    text = json.dumps([__version__, sections], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class KeptSamples:
    """The samples that are kept in a folder of the run."""

    def __init__(self, folder: Path, recipe: str, stores: GroupStores, start_step: int) -> None:
        """`recipe`: as describe_recipe returns it; `start_step`: what the run goes on after."""
        self._folder = folder
        self._recipe = recipe
        self._stores = stores
        self._start_step = start_step

    async def write(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """Keep finished groups with the checkpoint of `step`."""
        folder = self._folder / f"step_{step:06d}"
        try:
            with report_unwritable(folder):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                if groups:
                    await self._write(folder, groups)
                self._forget_others(step)
        except (RankError, SamplesLostError, UnwritableError) as error:
            _log.warning("finished samples are not kept with step %d: %s", step, error)

    async def _write(self, folder: Path, groups: Sequence[SampleGroup]) -> None:
        leases = list({sample.lease: None for group in groups for sample in group.samples})
        files = await self._stores.write_groups(folder, leases)
        here = {store: file for store, file in files.items() if (folder / file.name).is_file()}
        if absent := sorted(files.keys() - here.keys()):
            _log.warning("stores %s are on nodes that do not see %s", absent, folder)
        entries = {
            group.position: FinishedGroup(group.samples, group.scores)
            for group in groups
            if all(sample.lease.store in here for sample in group.samples)
        }
        written = write_plain(folder / _GROUPS, entries)
        listed = {store: asdict(file) for store, file in here.items()}
        text = json.dumps({"recipe": self._recipe, "groups": asdict(written), "files": listed})
        write_whole(folder / _LIST, text, lasting=True)

    def _forget_others(self, step: int) -> None:
        """Delete what was kept with earlier checkpoints, and with later ones that do not count."""
        kept = sorted(self._folder.glob("step_*"))
        own = self._folder / f"step_{step:06d}"
        before = [folder for folder in kept if folder < own]
        for folder in {*kept} - {own, *before[1 - NUM_KEPT :]}:
            shutil.rmtree(folder, ignore_errors=True)

    async def read(self) -> dict[int, FinishedGroup]:
        """Return what was kept with the checkpoint that the run goes on after, by position."""
        folder = self._folder / f"step_{self._start_step:06d}"
        if not (folder / _LIST).is_file():
            return {}
        listed = json.loads((folder / _LIST).read_text())
        if listed["recipe"] != self._recipe:
            _log.warning("%s: samples are drawn again, as the recipe is another one", folder)
            return {}
        try:
            groups = GroupFile(**listed["groups"])
            entries: dict[int, FinishedGroup] = read_plain(folder, groups)
        except (OSError, ValueError) as error:
            _log.warning("finished samples are drawn again: %s", error)
            return {}
        places: dict[tuple[int, int], GroupLease] = {}
        numbers = defaultdict(set)
        for sample in (sample for entry in entries.values() for sample in entry.samples):
            numbers[sample.lease.store].add(sample.lease.group)
        for store, facts in listed["files"].items():
            own = sorted(numbers[int(store)])
            try:
                found = await self._stores.read_groups(folder, GroupFile(**facts), own)
            except (RankError, SamplesLostError) as error:
                _log.warning("finished samples are drawn again: %s", error)
                continue
            places |= {(int(store), number): lease for number, lease in found.items()}
        restored = {
            position: moved
            for position, entry in entries.items()
            if (moved := _move(entry, places)) is not None
        }
        _log.info("%d finished groups of the launch before are kept", len(restored))
        return restored


def _move(
    entry: FinishedGroup, places: Mapping[tuple[int, int], GroupLease]
) -> FinishedGroup | None:
    """Return the group at its new places; None if a store does not have it."""
    leases = [places.get((s.lease.store, s.lease.group)) for s in entry.samples]
    moved = [
        replace(sample, lease=lease)
        for sample, lease in zip(entry.samples, leases, strict=True)
        if lease is not None
    ]
    return replace(entry, samples=moved) if len(moved) == len(leases) else None
