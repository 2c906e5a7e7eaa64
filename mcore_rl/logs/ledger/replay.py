"""Goes through the records of a ledger and finds what does not balance.

    launch: what later launches take back becomes undrawn again
    drawn:  a position follows the one before, after all that are to be drawn again
    step:   its samples = those it trained + those left out with a reason, each under way until now

Every imbalance names step, prompt and position. After one, the books go on as the record says, so
that one fault is told once.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from mcore_rl.logs.ledger.file import TORN, Record

UNDRAWN = 0
UNDER_WAY = -1
BEFORE = -2
"""Settled before this ledger began."""
MISSING = -3
"""Nobody knows what became of it; an imbalance tells so."""
_FIRST_REASON = -10
FINISHED = "finished"
"""How a launch ends that did all its steps."""
MOST_KEPT = 1000
"""Imbalances that are kept with their text; further ones are counted."""


@dataclass
class OpenPrompt:
    """A prompt that is under way: its groups with their samples, as far as they are drawn.

    born      version of the weights when it began
    oldest    version of its samples' oldest token; None: no group is complete
    given_up  why its last group is not used; empty while it is sampled
    """

    born: int
    groups: dict[int, int] = field(default_factory=dict)
    oldest: int | None = None
    is_scored: bool = False
    given_up: str = ""


@dataclass(frozen=True)
class StepEntry:
    """A step that counts: what it trained, by group, and its samples that it left out."""

    trained: Mapping[int, frozenset[int]]
    num_trained: int
    left_out: Counter[str]


class Replay:
    """The state of the books after the records so far."""

    def __init__(self) -> None:
        self.imbalances: list[str] = []
        self.num_imbalances = 0
        self.launch: Record = {}
        self.fates = array("q")
        """By position: a step, UNDRAWN, UNDER_WAY, BEFORE, MISSING, or a reason; see `reason`."""
        self.prompts = array("q")
        self.epochs = array("q")
        """By position: the place in `epoch_names`."""
        self.epoch_names: list[tuple[int, int]] = []
        """(data set, epoch)"""
        self.steps: dict[int, StepEntry] = {}
        self.events: Counter[str] = Counter()
        """Records by kind; also repeated and voided steps, and bytes of torn lines."""
        self.unused: Counter[str] = Counter()
        """Samples that no step has, by reason."""
        self.num_samples = 0
        self.by_engine: Counter[int] = Counter()
        self.ended = ""
        self.open: dict[int, OpenPrompt] = {}
        self._again: dict[int, None] = {}
        self._groups: dict[int, tuple[int, int]] = {}
        """(position, samples) of groups that are under way."""
        self._pending: dict[int, dict[int, frozenset[int]]] = {}
        """Samples that steps trained whose own record has not come yet, by group."""
        self._last_groups: dict[int, tuple[int, int]] = {}
        self._positions = array("q")
        """Position of each group of this launch, by its number; -1: not known."""
        self._reasons: list[str] = []
        self._version = 0
        self._apply: Mapping[str, Callable[[Record], None]] = {
            "launch": self._apply_launch,
            "drawn": self._apply_drawn,
            "again": self._apply_again,
            "sampled": self._apply_sampled,
            "scored": self._apply_scored,
            "lost": self._apply_lost,
            "given_up": self._apply_given_up,
            "rejected": self._apply_rejected,
            "trained": self._apply_trained,
            "step": self._apply_step,
            "sync": self._apply_sync,
            "end": self._apply_end,
            TORN: self._apply_torn,
        }

    def apply(self, record: Record) -> None:
        """Take in the next record; kinds that say nothing of prompts are counted."""
        kind = record["is"]
        self.events[kind] += 1
        apply = self._apply.get(kind)
        if apply is not None:
            self.ended = ""
            apply(record)

    @property
    def last_step(self) -> int:
        return max(self.steps, default=int(self.launch.get("step", 0)))

    def reason(self, fate: int) -> str:
        """Return why a prompt was rejected, for a fate at or below the first reason's."""
        return self._reasons[_FIRST_REASON - fate]

    def name(self, position: int) -> str:
        """Return how an imbalance names a prompt."""
        if not 0 <= position < len(self.fates) or self.prompts[position] < 0:
            return f"position {position}"
        source, epoch = self.epoch_names[self.epochs[position]]
        where = f"data set {source}, " if len(self.launch.get("rows", ())) > 1 else ""
        return f"prompt {self.prompts[position]} ({where}epoch {epoch}, position {position})"

    def _blame(self, text: str) -> None:
        self.num_imbalances += 1
        if len(self.imbalances) < MOST_KEPT:
            self.imbalances.append(text)

    def _apply_launch(self, record: Record) -> None:
        is_first = not self.launch
        last_step, step = self.last_step, record["step"]
        self.events["torn_bytes"] += record.get("torn", 0)
        if is_first:
            self._begin_at(record["next"])
        elif step > last_step:
            self._blame(
                f"a launch goes on after step {step}, but the books end at step {last_step}"
            )
        self.launch = record
        self._version = step
        void = [number for number in self.steps if number > step]
        for number in void:
            entry = self.steps.pop(number)
            self.unused["void: trained"] += entry.num_trained
            self.unused["void: left out"] += entry.left_out.total()
        self.events["voided_steps"] += len(void)
        for prompt in self.open.values():
            self.unused["void: under way"] += sum(prompt.groups.values())
        self.open.clear()
        self._groups.clear()
        self._pending.clear()
        self._last_groups.clear()
        del self._positions[:]
        self._take_back(step, record["next"], record["again"], is_first)

    def _begin_at(self, num_before: int) -> None:
        """Begin the books of a run that drew prompts before it had a ledger."""
        for _ in range(num_before):
            self._add(BEFORE)

    def _take_back(self, step: int, until: int, again: Iterable[int], is_first: bool) -> None:
        """Make the prompts undrawn that a launch after `step` draws again."""
        if until > len(self.fates):
            num = until - len(self.fates)
            self._blame(f"the launch after step {step}: {num} prompts were drawn without a record")
            self._begin_at(num)
        self._again = dict.fromkeys(again)
        for position in self._again:
            if 0 < self.fates[position] <= step:
                self._blame(
                    f"{self.name(position)} was trained by step {self.fates[position]}, and the"
                    f" launch after step {step} draws it again"
                )
            self.fates[position] = UNDRAWN
        for table in (self.fates, self.prompts, self.epochs):
            del table[until:]
        if is_first:
            return
        for position, fate in enumerate(self.fates):
            is_void = fate > step or fate in (UNDRAWN, UNDER_WAY)
            if is_void and position not in self._again:
                self._blame(
                    f"{self.name(position)} is lost: it was {self._describe(fate)}, and the launch"
                    f" after step {step} does not draw it again"
                )
                self.fates[position] = MISSING

    def _describe(self, fate: int) -> str:
        if fate > 0:
            return f"trained by step {fate}, which is void"
        return "under way" if fate == UNDER_WAY else "to be drawn again"

    def _add(self, fate: int, prompt: int = -1, epoch: int = 0) -> None:
        self.fates.append(fate)
        self.prompts.append(prompt)
        self.epochs.append(epoch)

    def _apply_drawn(self, record: Record) -> None:
        name = (record["source"], record["epoch"])
        if name not in self.epoch_names[-8:]:
            self.epoch_names.append(name)
        epoch = len(self.epoch_names) - 1 - self.epoch_names[::-1].index(name)
        for position, prompt in enumerate(record["prompts"], start=record["at"]):
            if position in self._again:
                del self._again[position]
                if self.prompts[position] not in (-1, prompt):
                    self._blame(f"{self.name(position)} was drawn again as prompt {prompt}")
                self.prompts[position] = prompt
                self.epochs[position] = epoch
                self.fates[position] = UNDER_WAY
            elif position < len(self.fates):
                self._blame(f"{self.name(position)} was drawn a second time, as prompt {prompt}")
                continue
            else:
                self._check_none_waits(position)
                for missing in range(len(self.fates), position):
                    self._add(MISSING)
                    self._blame(f"position {missing} was passed over: {position} was drawn instead")
                self._add(UNDER_WAY, prompt, epoch)
            self.open[position] = OpenPrompt(self._version)

    def _check_none_waits(self, position: int) -> None:
        """Name the prompts that should have been sampled again before a new one is drawn."""
        for waiting in list(self._again):
            self._blame(
                f"{self.name(waiting)} is lost: a launch was to draw it again, and position"
                f" {position} was drawn first"
            )
            self.fates[waiting] = MISSING
        self._again.clear()
        for waiting in [key for key, prompt in self.open.items() if prompt.given_up]:
            self._blame(
                f"{self.name(waiting)} is lost: it was given up ({self.open[waiting].given_up}),"
                f" and position {position} was drawn before it was sampled again"
            )
            self._end(waiting, MISSING)

    def _apply_again(self, record: Record) -> None:
        position = record["at"]
        prompt = self.open.get(position)
        if prompt is None or not prompt.given_up:
            self._blame(f"{self.name(position)} was sampled again, but nothing had given it up")
            return
        self.open[position] = OpenPrompt(self._version)

    def _apply_sampled(self, record: Record) -> None:
        position, group, num = record["at"], record["group"], len(record["tokens"])
        self.num_samples += num
        self._count_by_engine(record.get("engines"), num)
        prompt = self.open.get(position)
        if prompt is None:
            self._blame(f"group {group} was sampled for {self.name(position)}, not under way")
            return
        if group in self._groups:
            self._blame(f"group {group} was sampled twice, for {self.name(position)}")
        self._positions.extend([-1] * (group + 1 - len(self._positions)))
        self._positions[group] = position
        prompt.groups[group] = num
        prompt.oldest = _find_oldest(record["weights"], prompt.born)
        self._groups[group] = (position, num)

    def _count_by_engine(self, engines: int | list[int | list[int]] | None, num: int) -> None:
        """Count samples for the engines that drew them, one that moved for each of its engines."""
        if isinstance(engines, list):
            of_samples = [[each] if isinstance(each, int) else each for each in engines]
            self.by_engine.update(chain.from_iterable(of_samples))
        elif engines is not None:
            self.by_engine[engines] += num

    def _apply_scored(self, record: Record) -> None:
        group = record["group"]
        position, num = self._groups.get(group, (-1, 0))
        prompt = self.open.get(position)
        if prompt is None:
            self._blame(f"group {group} was scored, but was not under way")
            return
        if num != len(record["rewards"]):
            self._blame(
                f"group {group} of {self.name(position)} has {num} samples and"
                f" {len(record['rewards'])} rewards"
            )
        prompt.is_scored = True

    def _apply_lost(self, record: Record) -> None:
        for group in record["groups"]:
            position, _ = self._groups.pop(group, (-1, 0))
            prompt = self.open.get(position)
            if prompt is not None:
                self.unused["lost"] += prompt.groups.pop(group, 0)

    def _apply_given_up(self, record: Record) -> None:
        position, why = record["at"], record["why"]
        prompt = self.open.get(position)
        if prompt is None or prompt.given_up:
            self._blame(f"{self.name(position)} was given up ({why}), but was not under way")
            return
        self._drop_groups(prompt, why)
        prompt.given_up = why

    def _drop_groups(self, prompt: OpenPrompt, why: str) -> None:
        for group in prompt.groups:
            self._groups.pop(group, None)
        self.unused[why] += sum(prompt.groups.values())
        prompt.groups.clear()

    def _apply_rejected(self, record: Record) -> None:
        position, why = record["at"], record["why"]
        prompt = self.open.get(position)
        if prompt is None:
            self._blame(f"{self.name(position)} was rejected ({why}), but was not under way")
            return
        if not prompt.is_scored:
            self._blame(f"{self.name(position)} was rejected ({why}) before it was scored")
        self._drop_groups(prompt, f"rejected: {why}")
        if why not in self._reasons:
            self._reasons.append(why)
        self._end(position, _FIRST_REASON - self._reasons.index(why))

    def _end(self, position: int, fate: int) -> None:
        """Close the books of a prompt; its samples that no step has were drawn in vain."""
        self._drop_groups(self.open.pop(position), "drawn beside")
        self.fates[position] = fate

    def _apply_trained(self, record: Record) -> None:
        step = record["step"]
        trained = self._unpack(record["groups"])
        for group, sample, num in record.get("more", ()):
            self._blame(
                f"step {step} trained sample {sample} of {self._name_group(group)} {num} times,"
                " more often than the recipe says"
            )
        entry = self.steps.get(step)
        if entry is not None or step in self._pending:
            self.events["repeated_steps"] += 1
        if entry is None:
            self._pending[step] = trained
            return
        for group, samples in trained.items():
            others = samples - entry.trained.get(group, frozenset())
            if others:
                self._blame(
                    f"step {step} was repeated after a recovery, and trained"
                    f" {self._name_samples(group, others)}, which it had not before"
                )

    def _apply_step(self, record: Record) -> None:
        step = record["step"]
        if step != self.last_step + 1:
            self._blame(f"step {step} follows step {self.last_step}")
        drawn = self._unpack(record["groups"])
        trained = self._pending.pop(step, None)
        if trained is None:
            self._blame(f"step {step} has samples, but no record says that it trained any")
            trained = {}
        left_out: dict[int, set[int]] = {}
        reasons: Counter[str] = Counter()
        for why, packed in record.get("left_out", {}).items():
            for group, samples in self._unpack(packed).items():
                left_out.setdefault(group, set()).update(samples)
                reasons[why] += len(samples)
        for group, samples in trained.items():
            others = samples - drawn.get(group, frozenset())
            if others:
                self._blame(
                    f"step {step} trained {self._name_samples(group, others)}, which it does not"
                    " name as its own"
                )
        for group, samples in drawn.items():
            found = trained.get(group, frozenset()), frozenset(left_out.get(group, ()))
            self._check_group(step, group, samples, *found)
        self._close_prompts(step, drawn)
        num_trained = sum(map(len, trained.values()))
        self.steps[step] = StepEntry(trained, num_trained, reasons)
        before = self.steps.get(step - 1)
        if before is not None:  # only the last step can be repeated
            self.steps[step - 1] = StepEntry({}, before.num_trained, before.left_out)
        self._check_none_is_stuck(step)

    def _check_group(
        self,
        step: int,
        group: int,
        samples: frozenset[int],
        trained: frozenset[int],
        left_out: frozenset[int],
    ) -> None:
        """Name the samples of a step's group that were not trained exactly once or left out."""
        unknown = samples - trained - left_out
        if unknown:
            self._blame(
                f"step {step} has {self._name_samples(group, unknown)}, did not train"
                f" {'it' if len(unknown) == 1 else 'them'}, and gives no reason"
            )
        both = trained & left_out
        if both:
            self._blame(f"step {step} trained {self._name_samples(group, both)} and left it out")
        position, num = self._find_position(group), self._groups.get(group, (-1, 0))[1]
        if position < 0:
            self._blame(f"step {step} has group {group}, which was never sampled")
        elif position not in self.open:
            how = self.fates[position]
            earlier = f"step {how} trained it" if how > 0 else "it was not under way"
            self._blame(f"step {step} has {self.name(position)} (group {group}), but {earlier}")
        elif group not in self._groups:
            self._blame(f"step {step} has {self._name_group(group)}, which was given up or lost")
        elif not self.open[position].is_scored:
            self._blame(f"step {step} has {self._name_group(group)}, which nothing scored")
        elif len(samples) != num:
            self._blame(
                f"step {step} has {len(samples)} samples of {self._name_group(group)}, of {num}"
            )

    def _close_prompts(self, step: int, drawn: Iterable[int]) -> None:
        groups: dict[int, tuple[int, int]] = {}
        seen: dict[int, int] = {}
        for group in drawn:
            position, num = self._groups.pop(group, (-1, 0))
            prompt = self.open.get(position)
            if prompt is None:
                continue
            groups[group] = (position, num)
            del prompt.groups[group]
            if position in seen:
                self._blame(
                    f"step {step} has {self.name(position)} twice: groups {seen[position]} and"
                    f" {group}"
                )
            seen[position] = group
        for position in seen:
            self._end(position, step)
        self._last_groups = groups

    def _check_none_is_stuck(self, step: int) -> None:
        """Name the prompts that a step should have taken, rejected or given up."""
        bound = self.launch["bound"]
        is_sync = self.launch["mode"] == "sync"
        for position, prompt in list(self.open.items()):
            oldest = prompt.born if prompt.oldest is None else prompt.oldest
            is_late = bound is not None and oldest < step - 1 - bound
            if is_sync or (is_late and not prompt.given_up):
                why = "it was neither trained nor rejected by" if is_sync else "it was too old for"
                self._blame(f"{self.name(position)} is lost: {why} step {step}")
                self._end(position, MISSING)

    def _apply_sync(self, record: Record) -> None:
        self._version = record["version"]

    def _apply_end(self, record: Record) -> None:
        self.ended = record["how"]
        if self.ended == FINISHED:
            for step in self._pending:
                self._blame(f"step {step} was trained, but no record names its samples")

    def _apply_torn(self, record: Record) -> None:
        self.events["torn_bytes"] += record["bytes"]

    def _unpack(self, packed: Iterable[Any]) -> dict[int, frozenset[int]]:
        """Return the samples of each group."""
        found: dict[int, frozenset[int]] = {}
        for entry in packed:
            if isinstance(entry, int):
                _, num = self._groups.get(entry, self._last_groups.get(entry, (-1, 0)))
                found[entry] = frozenset(range(num))
            else:
                group, *samples = entry
                found[group] = frozenset(samples)
        return found

    def _find_position(self, group: int) -> int:
        return self._positions[group] if group < len(self._positions) else -1

    def _name_group(self, group: int) -> str:
        position = self._find_position(group)
        return f"group {group}" if position < 0 else f"{self.name(position)}, group {group}"

    def _name_samples(self, group: int, samples: Iterable[int]) -> str:
        numbers = sorted(samples)
        word = "sample" if len(numbers) == 1 else "samples"
        return f"{word} {', '.join(map(str, numbers))} of {self._name_group(group)}"


def _find_oldest(weights: Any, born: int) -> int:
    """Return the version of the oldest token in the `weights` of a record; else `born`."""
    versions: list[int] = []
    for sample in weights if isinstance(weights, list) else [weights]:
        versions += [span[1] for span in sample] if isinstance(sample, list) else [sample]
    return min(versions, default=born)
