"""Reads episodes.jsonl, and checks that it is complete."""

from pathlib import Path

from mcore_rl.logs.rows import read_rows


def reasons_by_group(path: Path) -> dict[int, list[str]]:
    """Return the reasons of each group's episodes.

    Each group that began must have ended once, with a reason for each episode.
    """
    begun: dict[int, int] = {}
    ended: dict[int, list[str]] = {}
    for row in read_rows(path):
        if "episodes" in row:
            assert row["group"] not in begun, f"{row} began before"
            begun[row["group"]] = row["episodes"]
        elif "ends" in row:
            assert row["group"] not in ended, f"{row} ended before"
            ended[row["group"]] = row["ends"]
    assert begun == {group: len(ends) for group, ends in ended.items()}
    return ended
