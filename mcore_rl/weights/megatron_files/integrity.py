"""Compares a checkpoint folder with its checksums.json and names the file that is damaged.

The bytes are divided among ranks, so that all ranks together read each byte once.
Peak memory: 4 MiB.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_rl.process.file_list import find_difference
from mcore_rl.weights.hf.checksums import ByteSpan, FileSums, sum_ranges

REMEDY = (
    "the checkpoint is damaged or was changed: copy it again from where it came, or resume from the"
    " one before it (run.resume=newest_whole); a file that you changed yourself is accepted by name"
    " (mcore-rl-ckpt checksums <folder> --changed <file>)"
)

COPY_AGAIN = (
    "copy it again from where it came, or resume from the checkpoint before it"
    " (run.resume=newest_whole)"
)
_DAMAGE = re.compile(r"damaged|truncated|does not agree|belongs? to nothing|overlaps (an|the)")


def add_remedy(message: str) -> str:
    """Return the message of an error, with what to do if it tells of damage and says nothing."""
    if _DAMAGE.search(message) is None or "copy it" in message or "newest_whole" in message:
        return message
    return f"{message}: {COPY_AGAIN}"


def check_sizes(folder: Path, sums: Mapping[str, FileSums]) -> None:
    """Raise ValueError with the path of a file that is missing, unlisted or of another size."""
    difference = find_difference(folder, {name: entry.num_bytes for name, entry in sums.items()})
    if difference:
        raise ValueError(f"{difference}: {REMEDY}")


def list_spans_of_rank(
    sums: Mapping[str, FileSums], rank: int, num_ranks: int
) -> dict[str, list[ByteSpan]]:
    """Return the spans, by file, that one of `num_ranks` ranks is to check.

    Each span goes to exactly one rank: the one in whose equal share of all bytes its middle lies.
    A rank's spans are consecutive, so that it reads sequentially.
    """
    total = sum(entry.num_bytes for entry in sums.values())
    shares: dict[str, list[ByteSpan]] = defaultdict(list)
    bytes_before = 0
    for name, entry in sorted(sums.items()):
        for span in entry.spans:
            middle = 2 * bytes_before + span.num_bytes
            if middle * num_ranks // (2 * total) == rank:
                shares[name].append(span)
            bytes_before += span.num_bytes
    return dict(shares)


def find_damage(folder: Path, name: str, spans: Sequence[ByteSpan]) -> ByteSpan | None:
    """Return the first of `spans` of a file whose bytes have another checksum; None if all agree.

    Raises ValueError with the path if the file ends too early.
    """
    ranges = [(span.start, span.stop) for span in spans]
    actual = sum_ranges(folder / name, ranges)
    for span, actual_span in zip(spans, actual, strict=True):
        if span != actual_span:
            return span
    return None
