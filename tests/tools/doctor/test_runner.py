"""Checks in processes of their own: outcomes, deadlines, crashes, and nothing left behind."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mcore_rl.tools.doctor.check import Check, Result, Stage
from mcore_rl.tools.doctor.run_checks import SETTINGS
from mcore_rl.tools.doctor.runner import choose_stages, find_check, run_check, run_stages, summarize


def never() -> dict[str, object]:
    raise AssertionError("this process only starts others")


def test_a_check_past_its_deadline_fails_and_leaves_no_process(tmp_path: Path) -> None:
    stopped = find_check("sync", "a stopped sender is named")
    check = Check(stopped.name, stopped.run, deadline_s=4.0)
    result = run_check(Stage("sync", "", (check,)), check, tmp_path)
    assert (result.outcome, result.figures) == ("failed", {})
    folder = tmp_path / "sync_a_stopped_sender_is_named"
    assert result.why.startswith(f"not done after 4 s; its files are in {folder}; its last output:")
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
        if (
            "mcore_rl.tools.doctor.runner" in words
            and process.info["status"] != psutil.STATUS_ZOMBIE
        ):
            found.append(process)
    return found


@pytest.mark.slow
def test_a_check_whose_process_crashes_fails_with_its_last_output(tmp_path: Path) -> None:
    unknown = Check("no such check", never)
    result = run_check(Stage("sync", "", (unknown,)), unknown, tmp_path)
    assert result.outcome == "failed"
    assert result.why.startswith(f"ended with status 1; its files are in {tmp_path}/sync_no_such")
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


def test_the_files_of_a_check_that_fails_stay_but_not_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage `run` is refused by a setting, after its model and data were written."""
    monkeypatch.setenv(SETTINGS, json.dumps(["rollout.tp=3", "rollout.ep=2"]))
    check = replace(find_check("run", "GRPO with SGLang"), deadline_s=120.0)
    folder = tmp_path / "run_GRPO_with_SGLang"
    folder.mkdir()
    (folder / "of_an_earlier_check").touch()
    result = run_check(Stage("run", "", (check,)), check, tmp_path)
    assert result.outcome == "failed"
    assert "mcore-rl train ended with status 2" in result.why
    assert "rollout.ep=2 does not divide rollout.tp=3" in result.why
    assert result.why.startswith(f"ended with status 1; its files are in {folder};")
    sizes = json.loads((folder / "arithmetic" / "model" / "config.json").read_text())
    assert (sizes["head_dim"], sizes["moe_intermediate_size"]) == (64, 128)
    assert not (folder / "of_an_earlier_check").exists()


@pytest.mark.slow
def test_a_check_that_may_take_longer_than_is_left_is_skipped_by_name(
    tmp_path: Path, capsys
) -> None:
    [stage] = choose_stages("", "sync:FP8 packing,sync:kernels_of_a_bucket,sync:rate staged")
    deadlines = zip(stage.checks, (60, 99, 100), strict=True)
    short = tuple(replace(check, deadline_s=seconds) for check, seconds in deadlines)
    assert run_stages([replace(stage, checks=short)], tmp_path, seconds=100)
    first, second, third, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["outcome"] == "ok", first
    for line, deadline_s in ((second, 99), (third, 100)):
        assert line["outcome"] == "skipped"
        left = re.fullmatch(
            rf"may take {deadline_s} s, and (\d+) of --seconds=100 are left", line["why"]
        )
        assert left is not None and int(left[1]) < 99, line
    assert summary["left_out"] == "sync:FP8 packing,sync:rate staged"
    chosen = choose_stages("", summary["left_out"])
    assert [check.name for check in chosen[0].checks] == ["FP8 packing", "rate staged"]


def test_seconds_in_which_no_check_fits_are_refused(tmp_path: Path) -> None:
    stages = choose_stages("", "te:recompute,te:speed")
    message = r"--seconds=100: no check fits; te:speed may take 240 s, others no less"
    with pytest.raises(ValueError, match=message):
        run_stages(stages, tmp_path / "logs", seconds=100)
    assert not (tmp_path / "logs").exists()


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
