"""A rank's process: what it returns for an exception, and where its output goes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cluster.rank_actor import (
    Raised,
    RankActor,
    shorten_traceback,
    sort_gpus,
    summarize_error,
)
from mcore_rl.process.errors import ProcessLostError

REDIRECT = """
import subprocess, sys
from pathlib import Path
from mcore_rl.cluster.rank_actor import redirect_output
redirect_output(Path(sys.argv[1]))
print("printed")
print("to stderr", file=sys.stderr)
subprocess.run(["echo", "by a child"])
import ctypes
ctypes.string_at(0)
"""


class Worker:
    def double(self, value: int) -> int:
        return 2 * value

    def fail_in_a_library(self) -> None:
        json.loads("{}", object_hook=self._raise)

    def _raise(self, _: object) -> None:
        raise ValueError("bad value")

    def lose_a_process(self) -> None:
        raise ProcessLostError("the server died")


@pytest.fixture
def actor() -> RankActor:
    """An actor outside Ray, with a worker."""
    actor = RankActor.__new__(RankActor)
    actor._worker = Worker()
    return actor


def test_a_call_returns_the_value_or_what_was_raised(
    actor: RankActor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert actor.call(60.0, "double", 21) == 42
    raised: Any = actor.call(60.0, "fail_in_a_library")
    assert raised.summary == "ValueError: bad value"
    assert "json/decoder.py" in capsys.readouterr().err, "the log has the whole traceback"
    lines = [line for line in raised.frames.splitlines() if line.startswith("  File")]
    assert len(lines) == 2 and all(__file__ in line for line in lines), raised.frames


def test_a_lost_process_needs_no_frames(actor: RankActor) -> None:
    assert actor.call(60.0, "lose_a_process") == Raised("the server died", "")


def test_the_innermost_frame_is_kept_even_if_it_is_a_librarys() -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    files = [line.split('"')[1] for line in _file_lines(caught.value)]
    assert len(files) == 2 and files[0] == __file__ and files[1].endswith("json/decoder.py")
    assert summarize_error(caught.value).startswith("json.decoder.JSONDecodeError: Expecting")


def _file_lines(error: BaseException) -> list[str]:
    lines = shorten_traceback(error).splitlines()
    return [line for line in lines if line.startswith("  File")]


def test_numbers_of_gpus_are_sorted_and_names_stay_in_their_order() -> None:
    assert sort_gpus(["10", "9", "1"]) == ("1", "9", "10")
    by_place = ["GPU-f0", "GPU-3a", "MIG-11"]
    assert sort_gpus(by_place) == tuple(by_place)
    assert sort_gpus([]) == ()


def test_all_output_of_a_process_goes_to_its_log_also_that_of_a_crash(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rank0.log"
    process = subprocess.run(
        [sys.executable, "-c", REDIRECT, str(log)], capture_output=True, text=True, check=False
    )
    assert process.returncode < 0 and process.stdout == process.stderr == ""
    text = log.read_text()
    for line in ("printed", "to stderr", "by a child", "Fatal Python error", "string_at"):
        assert line in text
