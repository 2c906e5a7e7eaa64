"""Checks in processes of their own: outcomes, deadlines, crashes, and nothing left behind."""

import json
import time
from pathlib import Path

import psutil
import pytest

from mcore_rl.doctor.check import Check, Result, Stage
from mcore_rl.doctor.runner import run_check, run_stages, summarize
from mcore_rl.doctor.stages import find_check


def never() -> dict[str, object]:
    raise AssertionError("this process only starts others")


def test_a_check_past_its_deadline_fails_and_leaves_no_process(tmp_path: Path) -> None:
    stopped = find_check("sync", "a stopped sender is named")
    check = Check(stopped.name, stopped.run, deadline_s=4.0)
    result = run_check(Stage("sync", "", (check,)), check, tmp_path)
    assert (result.outcome, result.figures) == ("failed", {})
    assert result.why.startswith("not done after 4 s; its last output: ")
    assert 4.0 <= result.seconds < 30
    deadline_s = time.monotonic() + 10
    while left := doctors() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not left


def doctors() -> list[psutil.Process]:
    """Processes that carry out checks."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if "mcore_rl.doctor.child" in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def test_a_check_whose_process_crashes_fails_with_its_last_output(tmp_path: Path) -> None:
    unknown = Check("no such check", never)
    result = run_check(Stage("sync", "", (unknown,)), unknown, tmp_path)
    assert result.outcome == "failed"
    assert result.why.startswith("ended with status 1; its last output: ")
    assert "ValueError" in result.why and "Traceback" in result.why
    assert (tmp_path / "sync_no_such_check.log").exists()


@pytest.mark.parametrize(
    ("check", "why"),
    [
        (Check("a", never, gpu=True), "there is no GPU"),
        (Check("a", never, modules=("torch", "no_such.module")), "no_such.module is not installed"),
    ],
)
def test_a_check_is_skipped_where_what_it_needs_is_missing(
    tmp_path: Path, check: Check, why: str
) -> None:
    result = run_check(Stage("sync", "", (check,)), check, tmp_path)
    assert result == Result("sync", "a", "skipped", 0.0, why)


def test_stages_print_their_lines_and_a_summary(tmp_path: Path, capsys) -> None:
    skipped = Check("a", never, gpu=True)
    assert run_stages([Stage("one", "", (skipped, skipped))], tmp_path / "logs")
    *lines, summary = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["outcome"] for line in lines] == ["skipped", "skipped"]
    assert summary["summary"] == {"ok": 0, "failed": 0, "skipped": 2}


def test_the_summary_names_what_failed() -> None:
    results = [
        Result("one", "a", "ok", 1.5),
        Result("one", "b", "failed", 2.0, "why"),
        Result("two", "c", "skipped", 0.0, "why"),
    ]
    summary = summarize(results)
    assert summary["summary"] == {"ok": 1, "failed": 1, "skipped": 1}
    assert summary["failed"] == ["one: b"]
    assert summary["seconds"] == 3.5
