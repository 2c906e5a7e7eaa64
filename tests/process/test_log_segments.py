"""Names of segments, their order, and the end of a log that was just rotated."""

from pathlib import Path

from mcore_rl.process.log_files import find_segments, read_tail, rotate


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
