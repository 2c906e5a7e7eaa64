"""An engine that dies is restarted, linked again and serves the current weights."""

import contextlib
import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs import Run

pytestmark = pytest.mark.e2e
Start = Callable[..., Run]
SETTINGS = ("run.steps=500", "eval.data=[]", "checkpoint.export_hf=false")
DIED_FOR_GOOD = r"engine http://\S+ \(log \S+\) died \(status -9\); its last lines:"


@pytest.mark.slow
def test_one_of_two_engines_dies_in_rollout_and_serves_again(start: Start) -> None:
    run = start("train", *SETTINGS, "rollout.engines=2", "rollout.restarts=1")
    run.wait_for("step 2: rollout", poll_s=0.002)
    run.find_one("mcore_rl.rollout.server").kill()
    run.wait_for("serves again")
    [url] = re.findall(r"engine (http://\S+) serves again", run.log())
    log = log_of(run, url)
    served = log.read_text().count("Prefill batch")
    next_step = run.log().count(": rollout") + 1
    run.wait_for(f"step {next_step + 1}: reward")
    assert log.read_text().count("Prefill batch") > served, (
        f"{url} is in rotation but gets no requests"
    )

    kill_server_of(run, url)
    assert run.finish(60) == 1, run.tail()
    assert re.search(DIED_FOR_GOOD, run.tail()), run.tail()
    run.assert_nothing_left()
    assert_no_sample_lost(run)
    failed = [line["sync/engines_failed"] for line in run.metrics() if "loss/total" in line]
    assert failed[0] == 0 and failed[1] == 1 and 0 in failed[2:], failed


@pytest.mark.slow
def test_a_stopped_engine_is_killed_and_serves_again(start: Start) -> None:
    """Its scheduler is stopped in a rollout, its HTTP server in a sync of weights."""
    run = start("train", *SETTINGS, "rollout.restarts=2", "rollout.request_timeout_s=16")
    run.wait_for("step 2: rollout", poll_s=0.002)
    run.find_one("sglang::scheduler").suspend()
    run.wait_for("serves again")
    server = run.find_one("mcore_rl.rollout.server")
    next_step = run.log().count(": sync") + 1
    run.wait_for(f"step {next_step}: sync", poll_s=0.002)
    server.suspend()
    run.wait_until(lambda: run.log().count("serves again") == 2, "second return")
    run.wait_for(f"step {next_step + 2}: train")
    run.process.send_signal(signal.SIGINT)
    assert run.finish(60) == 130, run.tail()
    run.assert_nothing_left()
    assert_no_sample_lost(run)
    log = "".join(path.read_text() for path in (run.run_dir / "logs").glob("engine_rank*.log"))
    stopped = r"engine http://\S+ \(log \S+\) was stopped \(state T of process \d+\) for 4 s"
    assert len(re.findall(stopped, log)) == 2, log
    deadline_s = time.monotonic() + 20
    while (left := unused_semaphores(run.began_s)) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert not left, left


@pytest.mark.slow
def test_the_only_engine_dies_in_rollout_and_in_sync_and_serves_again(start: Start) -> None:
    run = start("train", *SETTINGS, "rollout.restarts=2")
    run.wait_for("step 2: rollout", poll_s=0.002)
    run.find_one("sglang::scheduler").kill()
    run.wait_for("step 3: rollout")
    server = run.find_one("mcore_rl.rollout.server")
    run.wait_for("step 4: sync", poll_s=0.002)
    server.kill()
    run.wait_for("step 6: train")
    run.process.send_signal(signal.SIGINT)
    assert run.finish(60) == 130, run.tail()
    run.assert_nothing_left()
    assert_no_sample_lost(run)


@pytest.mark.slow
def test_an_engine_on_two_machines_starts_again_when_one_server_dies(start: Start) -> None:
    run = start(
        "train", *SETTINGS, "rollout.restarts=1", "rollout.tp=2", "rollout.nodes_per_engine=2"
    )
    run.wait_for("step 2: train")
    run.find_one("mcore_rl.rollout.server", "--node-rank 1").kill()
    run.wait_for("serves again")
    run.wait_for("step 5: train")
    run.find_one("mcore_rl.rollout.server", "--node-rank 0").kill()
    assert run.finish(60) == 1, run.tail()
    assert re.search(DIED_FOR_GOOD, run.tail()), run.tail()
    run.assert_nothing_left()
    assert_no_sample_lost(run)


def log_of(run: Run, url: str) -> Path:
    """Return the log of the restarted server, as its worker named it."""
    told = "".join(p.read_text() for p in (run.run_dir / "logs").glob("engine_rank*.log"))
    named = re.search(rf"engine {url} \(log (\S+)\) died", told)
    assert named is not None, told
    return Path(named.group(1))


def unused_semaphores(since_s: float) -> set[Path]:
    """Return the named semaphores made since then that no process has in its memory."""
    maps = ""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            maps += (process / "maps").read_text()
    unused = set()
    for path in Path("/dev/shm").glob("sem.*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime >= since_s and str(path) not in maps:
                unused.add(path)
    return unused


def kill_server_of(run: Run, url: str) -> None:
    run.find_one("mcore_rl.rollout.server", url.rpartition(":")[2]).kill()


def assert_no_sample_lost(run: Run) -> None:
    """Every step has its 16 samples, drawn from the weights that the trainer holds."""
    steps = [line for line in run.metrics() if "loss/total" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert {line["rollout/samples"] for line in steps} == {16.0}
    assert max(line["logprob_diff/mean"] for line in steps) < 1e-4
    rows = [json.loads(row) for row in (run.run_dir / "samples.jsonl").read_text().splitlines()]
    assert set(Counter(row["step"] for row in rows if row["step"] <= len(steps)).values()) == {16}
