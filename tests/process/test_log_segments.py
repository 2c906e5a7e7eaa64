"""A log's segments in order, the end of one that was just rotated, messages held back."""

from pathlib import Path

from mcore_rl.process.clock import replace_clock
from mcore_rl.process.log_files import LogThrottle, find_segments, read_tail, rotate


def test_segments_are_numbered_from_the_oldest_on(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    for others in ("a.log.1", "ab.000001.log", "a.000001.jsonl", "a.b.000001.log", "a.12.log"):
        (tmp_path / others).touch()
    assert find_segments(log) == []
    log.touch()
    assert rotate(log).name == "a.000001.log" and not log.exists()
    (tmp_path / "a.999999.log").touch()
    log.touch()
    assert rotate(log).name == "a.1000000.log"
    names = [part.name for part in find_segments(log)]
    assert names == ["a.000001.log", "a.999999.log", "a.1000000.log"]


def test_the_tail_of_a_log_goes_back_into_its_segments(tmp_path: Path) -> None:
    log = tmp_path / "a[1].log"
    assert read_tail(log, 3) == []
    for part in ("1\n2\n3\n", "4\n", "5\n6\n"):
        log.write_text(part)
        rotate(log)
    assert find_segments(log)[0].name == "a[1].000001.log"
    assert read_tail(log, 4) == ["3", "4", "5", "6"]
    log.write_text("7\n")
    (tmp_path / "a[1].previous.000009.log").write_text("of another log\n")
    assert read_tail(log, 4) == ["4", "5", "6", "7"]
    log.write_text("x" * 100_000 + "\nlast\n")
    assert read_tail(log, 1) == ["last"]


def test_one_message_in_a_while_counts_those_held_back() -> None:
    clock_s = 100.0
    written = []
    with replace_clock(lambda: clock_s):
        throttle = LogThrottle(every_s=10.0)
        for second in range(25):
            clock_s = 100.0 + second
            if throttle.is_due(2):
                written.append((second, throttle.describe_held()))
    assert written == [
        (0, ""),
        (10, ", and 18 more before it"),
        (20, ", and 18 more before it"),
    ]
