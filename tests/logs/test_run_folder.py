"""Run folders: what is kept where, and which checkpoint counts."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.process.disk import DiskFullError
from mcore_rl.process.log_files import find_segments
from tests.support.checkpoint_folders import write_checkpoint


def test_only_complete_checkpoints_count_and_the_oldest_are_pruned(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.newest_checkpoint() is None
    for step in (2, 4, 10):
        write_checkpoint(folder.checkpoint(step))
    (folder.checkpoints / "step_000012.incomplete").mkdir()
    (folder.checkpoints / "step_000001.deleted").mkdir()
    assert folder.newest_checkpoint() == folder.checkpoint(10)
    folder.prune(keep=2)
    left = sorted(p.name for p in folder.checkpoints.iterdir())
    assert left == ["step_000004", "step_000010", "step_000012.incomplete"]


def test_an_empty_folder_is_no_checkpoint_and_costs_no_whole_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path)
    whole = write_checkpoint(folder.checkpoint(8))
    folder.checkpoint(9).mkdir()
    assert folder.newest_checkpoint() == whole
    assert f"{folder.checkpoint(9)} has neither checksums.json nor .metadata" in caplog.text
    folder.prune(keep=1)
    assert whole.exists() and folder.checkpoint(9).exists()


@pytest.mark.parametrize("spoil", ["resize", "remove", "add", "cut list"])
def test_a_checkpoint_that_its_list_disproves_costs_no_whole_one(
    tmp_path: Path, spoil: str
) -> None:
    folder = RunFolder(tmp_path)
    whole, spoiled = (write_checkpoint(folder.checkpoint(step)) for step in (8, 9))
    if spoil == "resize":
        (spoiled / "common.pt").write_text("")
    elif spoil == "remove":
        (spoiled / "common.pt").unlink()
    elif spoil == "add":
        (spoiled / "__9_9.distcp").touch()
    else:
        (spoiled / "checksums.json").write_text('{"files"')
    assert folder.newest_checkpoint() == spoiled, "a resume names what is wrong with it"
    folder.prune(keep=1)
    assert whole.exists() and spoiled.exists()


def test_a_checkpoint_of_an_older_version_counts_without_a_list(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (write_checkpoint(folder.checkpoint(3)) / "checksums.json").unlink()
    assert folder.newest_checkpoint() == folder.checkpoint(3)
    (folder.checkpoint(3) / "common.pt").unlink()
    assert folder.newest_checkpoint() is None


def test_starting_over_moves_old_checkpoints_aside(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_checkpoint(folder.checkpoint(5))
    folder.parity_check.write_text("{}")
    folder.kept_samples.mkdir()
    assert folder.prepare({}, resume=True) == folder.checkpoint(5)
    assert folder.parity_check.exists() and folder.kept_samples.exists()
    assert folder.prepare({}, resume=False) is None
    assert folder.newest_checkpoint() is None
    assert len(list(tmp_path.glob("checkpoints.before_*/step_000005"))) == 1
    assert not folder.parity_check.exists(), "what the parity check of an earlier run has learned"
    assert not folder.kept_samples.exists(), "samples of the earlier run"


def test_a_run_that_continues_takes_over_what_an_older_version_learned(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "canary.json").write_text("learned")
    folder.prepare({}, resume=True)
    assert folder.parity_check.read_text() == "learned"
    (tmp_path / "canary.json").write_text("older")
    folder.prepare({}, resume=True)
    assert folder.parity_check.read_text() == "learned"


def test_configuration_and_log_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.prepare({"run": {"steps": 7}}, resume=True)
    logging.getLogger("mcore_rl.unit").info("step 1: rollout")
    assert OmegaConf.load(folder.path / "config.yaml").run.steps == 7
    assert "step 1: rollout" in (folder.logs / "controller.log").read_text()


def test_a_folder_that_the_kernel_refuses_is_named() -> None:
    """In /proc nobody may make a folder, root included."""
    message = r"run.dir=/proc/run: .*choose another run.dir"
    with pytest.raises(ValueError, match=message), RunFolder("/proc/run").lock():
        pass
    with pytest.raises(ValueError, match=message):
        RunFolder("/proc/run").prepare({}, resume=True)


def test_an_error_of_the_run_itself_is_not_taken_for_one_of_its_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="elsewhere"), RunFolder(tmp_path).lock():
        raise FileNotFoundError("elsewhere")


HOLDER = """
import sys, time
from mcore_rl.logs.run_folder import RunFolder

with RunFolder(sys.argv[1]).lock():
    print("locked", flush=True)
    time.sleep(60)
"""
ELSEWHERE = """
import sys, time
from pathlib import Path
from mcore_rl.process import lease

lease.read_boot_id = lambda: "another kernel"
with lease.hold_lease(Path(sys.argv[1]) / "run.lease", True, print, beat_s=0.1):
    print("locked", flush=True)
    time.sleep(60)
"""
"""A host whose locks do not count here."""


@contextmanager
def start_holder(source: str, folder: Path) -> Iterator[subprocess.Popen]:
    holder = subprocess.Popen(
        [sys.executable, "-c", source, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        yield holder
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.parametrize("source", [HOLDER, ELSEWHERE], ids=["here", "elsewhere"])
def test_a_second_process_is_refused_and_told_who_is_there(source: str, tmp_path: Path) -> None:
    with start_holder(source, tmp_path) as holder:
        with pytest.raises(ValueError) as caught, RunFolder(tmp_path).lock():
            pass
        if source == ELSEWHERE:  # whose death shows only after a minute without a beat
            holder.send_signal(signal.SIGINT)
            holder.wait(60)
    message = str(caught.value)
    where = re.escape(f"the run folder {tmp_path} is in use by process {holder.pid} on ")
    assert re.match(where + r"\S+ since .*: wait until that run ends, stop it, or choose", message)
    assert "\n" not in message
    with RunFolder(tmp_path).lock():
        pass


def test_a_process_whose_folder_another_host_took_ends_at_once(tmp_path: Path) -> None:
    lease = tmp_path / "run.lease"
    with start_holder(HOLDER, tmp_path) as holder:
        taken = json.loads(lease.read_text()) | {"mark": "m", "holder": "process 7 on other"}
        lease.write_text(json.dumps(taken))
        _, errors = holder.communicate(timeout=240)
        assert holder.returncode == 1
    assert f"{lease} was taken over by process 7 on other: this process ends" in errors.decode()
    assert json.loads(lease.read_text()) == taken


def test_errors_of_the_run_are_not_taken_for_the_lock(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^mine$"), RunFolder(tmp_path).lock():
        raise ValueError("mine")


def test_a_subfolder_is_locked_on_its_own(tmp_path: Path) -> None:
    """`mcore-rl eval` and `pairs` write to subfolders, and may run beside a training run."""
    with RunFolder(tmp_path).lock(), RunFolder(tmp_path / "eval").lock():
        pass


def test_a_full_disk_stops_the_preparation_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").symlink_to("/dev/full")
    with pytest.raises(DiskFullError, match=r"cannot write .*: no space left on device"):
        RunFolder(tmp_path).prepare({}, resume=True)


def test_the_log_takes_any_text_and_reports_a_full_disk_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The log that pytest captures must be text that a worker can send to the main process.
    monkeypatch.setattr(logging.getLogger("mcore_rl"), "propagate", False)
    logger = logging.getLogger("mcore_rl.unit")
    folder = RunFolder(tmp_path)
    folder.prepare({}, resume=True)
    logger.warning("lone surrogate: %s", "\ud83d")
    assert "lone surrogate: \\ud83d" in (folder.logs / "controller.log").read_text()
    full = RunFolder(tmp_path / "full")
    full.logs.mkdir(parents=True)
    (full.logs / "controller.log").symlink_to("/dev/full")
    full.prepare({}, resume=True)
    logger.warning("first")
    logger.warning("second")
    printed = capsys.readouterr().err
    assert printed.count("no space left on device") == 1 and "Traceback" not in printed


def test_the_log_is_rotated_and_no_line_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("mcore_rl"), "propagate", False)
    folder = RunFolder(tmp_path)
    folder.prepare({}, resume=True, rotate_bytes=1 << 20)
    for number in range(300):
        logging.getLogger("mcore_rl.unit").warning("%d %s", number, "y" * 10_000)
    log = folder.logs / "controller.log"
    segments = find_segments(log)
    assert [part.name for part in segments] == ["controller.000001.log", "controller.000002.log"]
    assert all(0 <= part.stat().st_size - (1 << 20) < 20_000 for part in segments)
    lines = [line for part in (*segments, log) for line in part.read_text().splitlines()]
    assert [int(line.split(": ")[1].split()[0]) for line in lines] == list(range(300))


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """`prepare` adds a handler to the package's logger."""
    package = logging.getLogger("mcore_rl")
    before = list(package.handlers)
    yield
    for handler in set(package.handlers) - set(before):
        package.removeHandler(handler)
