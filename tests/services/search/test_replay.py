"""A recording answers as the web did, survives a crash, and names what it lacks."""

import threading
from contextlib import closing
from pathlib import Path

import pytest

from mcore_rl.services.search.layout import Hit
from mcore_rl.services.search.replay import MissingRecordingError, Recording

HITS = [Hit({"id": "1", "contents": "ä\nb"}, 1.5), Hit({"id": "2", "contents": "c"}, 0.5)]


def test_what_was_recorded_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "web.jsonl"
    with closing(Recording(path, "record")) as recording:
        assert recording.find("who", 2) is None
        recording.add("who", 2, HITS)
        recording.add("nobody", 2, [])
        recording.add("who", 2, [])
        assert recording.find("who", 2) == HITS
    with closing(Recording(path, "replay")) as replay:
        assert replay.find("who", 2) == HITS and replay.find("nobody", 2) == []
        assert len(replay) == 2
        with pytest.raises(MissingRecordingError, match=r"no recording of query 'who' with topk 3"):
            replay.find("who", 3)


def test_a_line_that_a_crash_cut_is_dropped_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "web.jsonl"
    with closing(Recording(path, "record")) as recording:
        recording.add("a", 1, HITS)
        whole = path.read_bytes()
        recording.add("b", 1, HITS)
    path.write_bytes(path.read_bytes()[:-5])
    with closing(Recording(path, "record")) as recording:
        assert path.read_bytes() == whole
        assert recording.find("b", 1) is None
        recording.add("b", 1, HITS[:1])
    with closing(Recording(path, "replay")) as replay:
        assert replay.find("a", 1) == HITS and replay.find("b", 1) == HITS[:1]


def test_threads_record_every_answer_once(tmp_path: Path) -> None:
    path = tmp_path / "web.jsonl"
    with closing(Recording(path, "record")) as recording:

        def work() -> None:
            for i in range(50):
                recording.add(str(i), 1, HITS)
                assert recording.find(str(i), 1) == HITS

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(path.read_text().splitlines()) == 50


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file; make one by --record"):
        Recording(tmp_path / "none.jsonl", "replay")
    (tmp_path / "broken.jsonl").write_text('{"query": "a"}\n')
    with pytest.raises(ValueError, match=r"broken.jsonl:1: no recording"):
        Recording(tmp_path / "broken.jsonl", "record")
    with pytest.raises(ValueError, match="mode is 'live'"):
        Recording(tmp_path / "x.jsonl", "live")
