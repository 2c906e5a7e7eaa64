"""Writes the ledger of a run: what became of every prompt and of every sample.

    drawn --> sampled --> scored --> trained --> step            the life of a prompt's group
      |         |           |--> rejected                        dynamic sampling replaces it
      |<- again +<- given_up, lost                               sampled once more

The balance (replay.py) reads these records and nothing else. So a record says what one part of the
run saw: `trained` comes from the batches that the trainer got, `step` from the loop.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any, Self

from mcore_rl.logs.ledger.file import LedgerFile
from mcore_rl.logs.ledger.replay import FINISHED
from mcore_rl.process.errors import describe_error, shorten
from mcore_rl.process.redaction import redact
from mcore_rl.types import CUT_OFF, WITHOUT_OUTCOME, StoredBatch, StoredSample
from mcore_rl.types.scores import Scores

EMPTY = "empty"
EQUAL_REWARDS = "equal_rewards"
SURPLUS = "surplus"
LOST = "lost"
_TEXT_CHARS = 300
_WARNINGS_PER_STEP = 20
_Row = tuple[int, int]
"""Number of a group and number of a row in it."""


@dataclass(frozen=True)
class LaunchEntry:
    """The state that a launch of a run begins with.

    step         it continues after; the steps beyond are void
    next         position of the first prompt that is not drawn yet
    again        positions before that which are drawn again, in order
    rows         prompts in an epoch of each data set
    mode         rollout.mode
    bound        versions that a sample may be behind; None: any number
    group_size   samples of a prompt
    passes       times that the policy trains on each sample of a step, and the critic
    replaces     whether dynamic sampling replaces groups
    role_part    algorithm.role_part
    """

    step: int
    next: int
    again: tuple[int, ...]
    rows: tuple[int, ...]
    seed: int
    mode: str
    bound: int | None
    group_size: int
    passes: tuple[int, int] = (1, 1)
    replaces: bool = False
    role_part: str = ""


@dataclass
class _Group:
    """A group of samples: its size, and which sample each row belongs to; None: the row itself."""

    size: int
    sample_of: dict[int, int] | None


@dataclass
class _Trained:
    """The rows that a step has trained on so far, and how often."""

    policy: Counter[_Row] = field(default_factory=Counter)
    critic: Counter[_Row] = field(default_factory=Counter)
    masked: set[_Row] = field(default_factory=set)
    lost_stores: set[int] = field(default_factory=set)


class RunLedger:
    """Appends a record for each event; threads may share it. It writes nothing before `begin`."""

    def __init__(self, path: Path | None = None, rotate_bytes: int = 0) -> None:
        """`path`: of the file; None: write nothing. `rotate_bytes`: see LedgerFile."""
        self._path = path
        self._rotate_bytes = rotate_bytes
        self._lock = RLock()
        self._file: LedgerFile | None = None
        self._launch: LaunchEntry | None = None
        self._groups_of: dict[int, list[int]] = {}
        """The groups of each prompt that is under way, by position."""
        self._groups: dict[int, _Group] = {}
        self._settled: list[int] = []
        """Groups of the last step, which a recovery may train again."""
        self._differs: dict[int, bool] = {}
        """Whether the rewards of a prompt's last group differ, by position."""
        self._trained = _Trained()
        self._num_warnings = 0
        self._handler = _Warnings(self)

    def begin(self, launch: LaunchEntry) -> None:
        """Open the file, and write how the run begins or goes on. Raises as LedgerFile does."""
        if self._path is None:
            return
        self._file = LedgerFile(self._path, self._rotate_bytes)
        self._launch = launch
        torn = {"torn": self._file.torn_bytes} if self._file.torn_bytes else {}
        self._write("launch", {**asdict(launch), "time": round(time.time(), 3), **torn})
        self._commit()
        logging.getLogger("mcore_rl").addHandler(self._handler)

    def close(self, error: BaseException | None = None) -> None:
        """Write how the run ended, and close the file."""
        logging.getLogger("mcore_rl").removeHandler(self._handler)
        with self._lock:
            if self._file is not None:
                how = FINISHED if error is None else _shorten(describe_error(error))
                self._write("end", {"how": how, "time": round(time.time(), 3)})
                self._file.close()
                self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *rest: object) -> None:
        self.close(error)

    def note(self, kind: str, **fields: Any) -> None:
        """Write an event of the whole run."""
        with self._lock:
            self._write(kind, fields)

    def note_fault(self, what: str, error: Exception) -> None:
        """Write that a part of a step failed; a record `recovered` follows if it is repeated."""
        self.note("fault", work=what, error=_shorten(describe_error(error)))

    def note_warning(self, text: str) -> None:
        """Write a fault or a recovery as the controller's log tells it, some of each step."""
        with self._lock:
            self._num_warnings += 1
            if self._num_warnings <= _WARNINGS_PER_STEP:
                self._write("warning", {"text": _shorten(text)})

    def note_drawn(
        self, position: int, prompts: Sequence[int], source: int = 0, epoch: int = 0
    ) -> None:
        """Write that prompts were drawn, at `position` and the positions that follow.

        prompts         their rows in the data sets
        source, epoch   of all of them
        """
        with self._lock:
            if self._file is not None:
                self._groups_of |= {position + i: [] for i in range(len(prompts))}
            fields = {"at": position, "prompts": list(prompts), "source": source, "epoch": epoch}
            self._write("drawn", fields)

    def note_again(self, position: int) -> None:
        """Write that a prompt which was given up is sampled again."""
        with self._lock:
            self._write("again", {"at": position})

    def note_sampled(self, samples: Sequence[StoredSample]) -> None:
        """Write samples, those of a prompt together.

        Prompts of evaluations have no position, and their samples no record.
        """
        with self._lock:
            for places in _split_groups(samples):
                group = [samples[place] for place in places]
                position, lease = group[0].prompt.position, group[0].lease
                if position not in self._groups_of or lease.group in self._groups:
                    continue
                self._groups_of[position].append(lease.group)
                self._groups[lease.group] = _Group(len(group), _map_rows(group))
                fields = {
                    "at": position,
                    "group": lease.group,
                    "store": lease.store,
                    "tokens": [sample.response_len for sample in group],
                    "ends": _join([sample.finish_reason for sample in group]),
                    "weights": _join([_list_versions(sample) for sample in group]),
                }
                if all(sample.engines for sample in group):
                    fields["engines"] = _join([_list_engines(sample) for sample in group])
                self._write("sampled", fields)

    def note_scored(self, samples: Sequence[StoredSample], scores: Scores) -> None:
        """Write the rewards of samples, those of a prompt together."""
        with self._lock:
            if self._launch is None:
                return
            for places in _split_groups(samples):
                first = samples[places[0]]
                if first.lease.group not in self._groups:
                    continue
                differ = scores.differ(places, self._launch.role_part)
                if len(places) == self._launch.group_size:
                    self._differs[first.prompt.position] = differ
                rewards = [_round(scores.rewards_N[place]) for place in places]
                fields = {"group": first.lease.group, "rewards": rewards, "differ": differ}
                self._write("scored", fields)

    def note_lost(self, samples: Iterable[StoredSample]) -> None:
        """Write that samples are gone with the process that kept them."""
        with self._lock:
            groups = dict.fromkeys(sample.lease.group for sample in samples)
            known = [group for group in groups if group in self._groups]
            if known:
                self._write("lost", {"groups": known})

    def give_up(self, position: int, why: str) -> None:
        """Write that the samples of a prompt will not be used, and that it is sampled again."""
        with self._lock:
            self._write("given_up", {"at": position, "why": why})
            if position in self._groups_of:
                self._forget(self._groups_of[position])
                self._groups_of[position] = []

    def reject(self, position: int, why: str) -> None:
        """Write that a prompt is not trained on."""
        with self._lock:
            self._write("rejected", {"at": position, "why": why})
            self._forget(self._groups_of.pop(position, ()))
            self._differs.pop(position, None)

    def begin_training(self) -> None:
        """Forget what an attempt to train a step trained on, as the step begins anew."""
        self._trained = _Trained()

    def note_batch(self, batch: StoredBatch, *, is_critic: bool = False) -> None:
        """Count the rows that an optimizer step trained on."""
        rows = list(zip(batch.group_N.tolist(), batch.index_N.tolist(), strict=True))
        trains = batch.is_trained_N.tolist()
        with self._lock:
            counter = self._trained.critic if is_critic else self._trained.policy
            counter.update(row for row, trained in zip(rows, trains, strict=True) if trained)
            masked = (row for row, trained in zip(rows, trains, strict=True) if not trained)
            self._trained.masked.update(masked)

    def note_lost_stores(self, stores: Iterable[int]) -> None:
        """Remember that an optimizer step goes on without samples of these stores."""
        self._trained.lost_stores |= set(stores)

    def end_training(self, step: int) -> None:
        """Write what a step trained on. The critic counts only while the policy does not train."""
        with self._lock:
            if self._launch is None:
                return
            trained = self._trained
            is_policy = bool(trained.policy)
            samples = self._count_samples(trained.policy if is_policy else trained.critic)
            expected = self._launch.passes[0 if is_policy else 1]
            more = [[*sample, num] for sample, num in samples.items() if num > expected]
            fields: dict[str, Any] = {"step": step, "groups": self._pack(samples)}
            if more:
                fields["more"] = more
            if not is_policy:
                fields["by"] = "critic"
            self._write("trained", fields)

    def note_step(
        self,
        step: int,
        samples: Sequence[StoredSample],
        scores: Scores,
        kept: Sequence[StoredSample],
    ) -> None:
        """Write the samples of a step, and why it does not train on some; bring all to the disk.

        kept   those that were there when their batch was made
        """
        with self._lock:
            if self._launch is None:
                return
            self._reject_others(samples)
            left_out: dict[str, list[_Row]] = {}
            are_kept = {id(sample) for sample in kept}
            for sample, has_outcome in zip(samples, scores.has_outcome_N, strict=True):
                why = self._find_why_not(sample, has_outcome, id(sample) in are_kept)
                if why:
                    left_out.setdefault(why, []).append(_name(sample))
            fields: dict[str, Any] = {"step": step, "groups": self._pack(map(_name, samples))}
            if left_out:
                fields["left_out"] = {why: self._pack(names) for why, names in left_out.items()}
            if self._num_warnings > _WARNINGS_PER_STEP:
                fields["warnings_held"] = self._num_warnings - _WARNINGS_PER_STEP
            self._num_warnings = 0
            self._write("step", {**fields, "time": round(time.time(), 3)})
            self._settle(samples)
            self._commit()

    def note_save(self, step: int) -> None:
        """Write that the checkpoint of a step was begun; bring all to the disk."""
        with self._lock:
            self._write("save", {"step": step})
            self._commit()

    def _reject_others(self, samples: Sequence[StoredSample]) -> None:
        """Write which of the prompts drawn for a step it replaced, where no other step has them."""
        assert self._launch is not None
        if self._launch.mode != "sync" or not self._launch.replaces:
            return
        taken = {sample.prompt.position for sample in samples}
        for position in [each for each in self._differs if each not in taken]:
            self.reject(position, SURPLUS if self._differs[position] else EQUAL_REWARDS)

    def _find_why_not(self, sample: StoredSample, has_outcome: bool, is_kept: bool) -> str:
        """Return why a step does not train on a sample; empty if it does or nobody knows."""
        group = sample.lease.group
        rows = [(group, row.index) for row in sample.episode_rows] or [_name(sample)]
        trained = self._trained.policy or self._trained.critic
        if any(row in trained for row in rows):
            return ""
        if sample.finish_reason in WITHOUT_OUTCOME:
            return sample.finish_reason
        if not has_outcome:
            return "no_reward"
        if not is_kept or sample.lease.store in self._trained.lost_stores:
            return LOST
        if not sample.response_len:
            return EMPTY
        is_masked = all(row in self._trained.masked for row in rows)
        return "overlong" if sample.finish_reason in CUT_OFF and is_masked else ""

    def _count_samples(self, rows: Mapping[_Row, int]) -> dict[_Row, int]:
        """Return how often each sample was trained, by group and number there."""
        found: dict[_Row, int] = {}
        for (number, row), num in rows.items():
            group = self._groups.get(number)
            sample_of = None if group is None else group.sample_of
            sample = (number, row if sample_of is None else sample_of[row])
            found[sample] = max(found.get(sample, 0), num)
        return found

    def _pack(self, samples: Iterable[_Row]) -> list[int | list[int]]:
        """Return a number for each whole group, and for others [number, samples ...]."""
        places: dict[int, list[int]] = {}
        for number, sample in samples:
            places.setdefault(number, []).append(sample)
        packed: list[int | list[int]] = []
        for number, found in places.items():
            group = self._groups.get(number)
            found.sort()
            is_whole = group is not None and found == list(range(group.size))
            packed.append(number if is_whole else [number, *found])
        return packed

    def _settle(self, samples: Sequence[StoredSample]) -> None:
        self._forget(self._settled)
        positions = dict.fromkeys(sample.prompt.position for sample in samples)
        self._settled = [
            group for position in positions for group in self._groups_of.pop(position, ())
        ]
        for position in positions:
            self._differs.pop(position, None)

    def _forget(self, groups: Iterable[int]) -> None:
        for group in groups:
            self._groups.pop(group, None)

    def _write(self, kind: str, fields: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.append({"is": kind, **fields})

    def _commit(self) -> None:
        if self._file is not None:
            self._file.commit()


class _Warnings(logging.Handler):
    """Hands warnings of the controller's log to the ledger: faults and recoveries are among them.

    A full disk is told by the next record that is no warning.
    """

    def __init__(self, ledger: RunLedger) -> None:
        super().__init__(logging.WARNING)
        self._ledger = ledger

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._ledger.note_warning(record.getMessage())
        except RuntimeError:
            self.handleError(record)


def _name(sample: StoredSample) -> _Row:
    return sample.lease.group, sample.sample_index


def _map_rows(samples: Sequence[StoredSample]) -> dict[int, int] | None:
    """Return which sample each row of episodes belongs to; None for single responses."""
    if not any(sample.episode_rows for sample in samples):
        return None
    return {row.index: sample.sample_index for sample in samples for row in sample.episode_rows}


def _list_versions(sample: StoredSample) -> int | list[list[int]]:
    """Return the weights of a sample's tokens: the version, or [tokens, version] of each span."""
    versions = {span.version for span in sample.versions}
    if len(versions) == 1:
        return versions.pop()
    return [[span.stop - span.start, span.version] for span in sample.versions]


def _list_engines(sample: StoredSample) -> int | list[int]:
    """Return the number of the engine that drew a sample, or of each that did, in order."""
    engines = list(dict.fromkeys(sample.engines))
    return engines[0] if len(engines) == 1 else engines


def _join(values: list[Any]) -> Any:
    """Return the word or number that all values are, or the list."""
    is_one = not isinstance(values[0], list) and all(value == values[0] for value in values)
    return values[0] if is_one else values


def _split_groups(samples: Sequence[StoredSample]) -> list[list[int]]:
    """Return the places of the samples of each prompt, which are neighbors."""
    groups: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        groups.setdefault(sample.lease.group, []).append(place)
    return list(groups.values())


def _round(reward: float) -> float | int | None:
    """Return a reward in four digits, whole numbers without a point; None if there is none."""
    if not math.isfinite(reward):
        return None
    rounded = float(f"{reward:.4g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _shorten(text: str) -> str:
    return shorten(redact(text), _TEXT_CHARS)
