"""Says whether the books of a run balance, as a table or as JSON.

ledger.jsonl --> Replay, record by record --> Balance: epochs, samples, steps, imbalances
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mcore_rl.logs.ledger.file import NAME, Record, read_records
from mcore_rl.logs.ledger.replay import BEFORE, MISSING, UNDER_WAY, UNDRAWN, Replay
from mcore_rl.logs.rows import has_rows

SHOWN = 20
"""Imbalances that the table shows."""


@dataclass(frozen=True)
class EpochBalance:
    """The prompts of an epoch that count; `rows` is the number of prompts in the data set.

    again   drawn before, and to be drawn again by the launch that is under way
    """

    source: int
    epoch: int
    rows: int
    drawn: int
    trained: int
    rejected: Mapping[str, int]
    under_way: int
    again: int
    missing: int


@dataclass(frozen=True)
class Balance:
    """The state of a run by its ledger.

    last_step    the newest step that counts
    before       prompts that the run drew before it had a ledger
    samples      samples by what became of them; they sum to num_samples
    left_out     samples of steps that were not trained on, by reason
    by_engine    samples that each engine drew, by its number; those that moved count twice
    events       launches, saves, syncs and so on
    ended        how the last launch ended; empty: it has not, or was killed
    """

    last_step: int
    ended: str
    before: int
    epochs: tuple[EpochBalance, ...]
    num_samples: int
    samples: Mapping[str, int]
    left_out: Mapping[str, int]
    by_engine: Mapping[int, int]
    events: Mapping[str, int]
    num_imbalances: int
    imbalances: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.num_imbalances

    def as_json(self) -> Mapping[str, object]:
        return {"balances": self.holds, **asdict(self)}


def read_balance(run_dir: Path) -> Balance:
    """Return the balance of a run folder.

    Raises ValueError if it has no ledger, or naming a line of the ledger that is damaged.
    """
    path = run_dir / NAME
    if not has_rows(path):
        raise ValueError(
            f"{run_dir} has no {NAME}: name the folder of a run of `mcore-rl train` (run.dir)"
        )
    return make_balance(read_records(path))


def make_balance(records: Iterable[Record]) -> Balance:
    """Return the balance of records."""
    return close_books(replay_records(records))


def replay_records(records: Iterable[Record]) -> Replay:
    """Return the state of the books after the records."""
    replay = Replay()
    for record in records:
        replay.apply(record)
    return replay


def count_trained(run_dir: Path) -> Counter[tuple[int, int, int]]:
    """Return how often each (data set, epoch, prompt) was trained, by the steps that count."""
    replay = replay_records(read_records(run_dir / NAME))
    places = zip(replay.fates, replay.epochs, replay.prompts, strict=True)
    return Counter(
        (*replay.epoch_names[epoch], prompt) for fate, epoch, prompt in places if fate > 0
    )


def close_books(replay: Replay) -> Balance:
    """Check what holds for epochs and samples as a whole, and return the balance."""
    twice = _find_twice(replay)
    samples = _count_samples(replay)
    lost = replay.num_samples - sum(samples.values())
    imbalances = [*replay.imbalances, *twice]
    if lost and not imbalances:
        imbalances.append(f"{abs(lost)} samples were {'drawn' if lost > 0 else 'used'} in excess")
    left_out: Counter[str] = Counter()
    for entry in replay.steps.values():
        left_out += entry.left_out
    return Balance(
        last_step=replay.last_step,
        ended=replay.ended,
        before=replay.fates.count(BEFORE),
        epochs=tuple(_balance_epochs(replay)),
        num_samples=replay.num_samples,
        samples=samples,
        left_out=dict(left_out),
        by_engine=dict(sorted(replay.by_engine.items())),
        events={kind: num for kind, num in replay.events.items() if num},
        num_imbalances=max(replay.num_imbalances, len(replay.imbalances))
        + len(imbalances)
        - len(replay.imbalances),
        imbalances=tuple(imbalances),
    )


def _find_twice(replay: Replay) -> list[str]:
    """Name the prompts that were drawn twice in an epoch."""
    first: dict[tuple[int, int], int] = {}
    found: list[str] = []
    for position, fate in enumerate(replay.fates):
        if fate in (BEFORE, UNDRAWN) or replay.prompts[position] < 0:
            continue
        key = (replay.epochs[position], replay.prompts[position])
        other = first.setdefault(key, position)
        if other != position:
            found.append(f"{replay.name(position)} was drawn before, at position {other}")
    return found


def _count_samples(replay: Replay) -> dict[str, int]:
    """Return how many samples came to each end, in the order of a sample's life."""
    ends = {
        "trained": sum(entry.num_trained for entry in replay.steps.values()),
        "left out": sum(entry.left_out.total() for entry in replay.steps.values()),
        "under way": sum(sum(prompt.groups.values()) for prompt in replay.open.values()),
    }
    return {name: num for name, num in {**ends, **replay.unused}.items() if num}


def _balance_epochs(replay: Replay) -> Iterable[EpochBalance]:
    by_epoch: dict[int, Counter[int]] = {}
    for fate, epoch, prompt in zip(replay.fates, replay.epochs, replay.prompts, strict=True):
        if prompt >= 0:
            by_epoch.setdefault(epoch, Counter())[min(fate, 1)] += 1
    rows = replay.launch.get("rows", ())
    for number, counts in by_epoch.items():
        source, epoch = replay.epoch_names[number]
        yield EpochBalance(
            source=source,
            epoch=epoch,
            rows=rows[source] if source < len(rows) else 0,
            drawn=counts.total() - counts[UNDRAWN],
            trained=counts[1],
            rejected={
                replay.reason(fate): num for fate, num in counts.items() if fate < MISSING and num
            },
            under_way=counts[UNDER_WAY],
            again=counts[UNDRAWN],
            missing=counts[MISSING],
        )


def format_balance(balance: Balance) -> str:
    """Return the balance as a table, with the first imbalances."""
    events = balance.events
    lines = [
        f"steps 1 to {balance.last_step}: {_describe_launches(balance)}",
        "",
        *_format_epochs(balance),
        "",
        f"samples {balance.num_samples}: {_list_counts(balance.samples) or 'none'}",
    ]
    if balance.left_out:
        lines.append(f"left out of steps: {_list_counts(balance.left_out)}")
    if balance.by_engine:
        drew = (f"engine {engine} {num}" for engine, num in balance.by_engine.items())
        lines.append(f"drawn by: {', '.join(drew)}")
    shown = {
        "saves": events.get("save", 0),
        "syncs": events.get("sync", 0),
        "recoveries": events.get("recovered", 0),
        "warnings": events.get("warning", 0),
    }
    lines.append(", ".join(f"{name}: {num}" for name, num in shown.items()))
    if torn := events.get("torn_bytes", 0):
        lines.append(f"a crash tore a last line: {torn} bytes, which say nothing")
    if balance.holds:
        return "\n".join([*lines, "", "the books balance"])
    lines += ["", f"the books do not balance: {balance.num_imbalances} imbalances"]
    lines += [f"  {text}" for text in balance.imbalances[:SHOWN]]
    if balance.num_imbalances > SHOWN:
        lines.append(f"  ... and {balance.num_imbalances - SHOWN} more")
    return "\n".join(lines)


def _describe_launches(balance: Balance) -> str:
    events = balance.events
    num_launches = events.get("launch", 0)
    parts = [f"{num_launches} launch{'' if num_launches == 1 else 'es'}"]
    for name in ("voided_steps", "repeated_steps"):
        if events.get(name):
            parts.append(f"{name.replace('_', ' ')}: {events[name]}")
    parts.append(balance.ended or "not ended, or killed")
    return "; ".join(parts)


def _format_epochs(balance: Balance) -> list[str]:
    """Return the table of epochs: what became of the prompts that were drawn."""
    if not balance.epochs:
        return ["no prompt was drawn"]
    reasons = list(dict.fromkeys(why for epoch in balance.epochs for why in epoch.rejected))
    has_sources = any(epoch.source for epoch in balance.epochs)
    head = ["epoch", "prompts", "drawn", "trained", *reasons, "under way", "again", "missing"]
    rows = [
        [
            f"{epoch.source}:{epoch.epoch}" if has_sources else str(epoch.epoch),
            *map(str, (epoch.rows, epoch.drawn, epoch.trained)),
            *(str(epoch.rejected.get(why, 0)) for why in reasons),
            *map(str, (epoch.under_way, epoch.again, epoch.missing)),
        ]
        for epoch in balance.epochs
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [head, *rows]
    ]


def _list_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{num} {name}" for name, num in counts.items())
