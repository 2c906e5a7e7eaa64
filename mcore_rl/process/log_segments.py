"""Names the segments of a log that is rotated: what was written first has the smallest number.

    engine.log, full -> engine.000001.log, and a new engine.log

A segment is renamed once and never written again, so nothing is lost or copied. A name that ends
with .previous is another log.
"""

import re
from pathlib import Path

_NUMBERED = re.compile(r"\.(\d{6,})$")


def find_segments(path: Path) -> list[Path]:
    """Return the segments of a log, the oldest first, without the file that is written."""
    found = [
        each
        for each in path.parent.glob(f"{_escape(path.stem)}.*{_escape(path.suffix)}")
        if _is_segment(each, path)
    ]
    return sorted(found, key=number_of)


def number_of(segment: Path) -> int:
    match = _NUMBERED.search(segment.stem)
    assert match is not None, segment
    return int(match[1])


def segment_path(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number:06d}{path.suffix}")


def rotate(path: Path) -> Path:
    """Make the log's file its newest segment, which is returned; the caller makes a new file."""
    number = max((number_of(segment) for segment in find_segments(path)), default=0) + 1
    segment = segment_path(path, number)
    path.rename(segment)
    return segment


def _is_segment(candidate: Path, path: Path) -> bool:
    match = _NUMBERED.search(candidate.stem)
    return (
        match is not None
        and candidate.suffix == path.suffix
        and candidate.stem[: match.start()] == path.stem
    )


def _escape(name: str) -> str:
    """Return a name in which glob's own characters stand for themselves."""
    return re.sub(r"([*?[])", r"[\1]", name)


def read_tail(path: Path, num_lines: int, most_bytes: int = 1 << 16) -> list[str]:
    """Return the last lines of a log, of its newest segments where the file itself has too few.

    No more than `most_bytes` are read of each file. Without a file there are no lines.
    """
    lines: list[str] = []
    for part in (path, *reversed(find_segments(path))):
        if len(lines) >= num_lines:
            break
        if part.exists():
            with part.open("rb") as file:
                file.seek(max(0, part.stat().st_size - most_bytes))
                lines = file.read(most_bytes).decode(errors="replace").splitlines() + lines
    return lines[-num_lines:]
