"""The log of an SGLang server is rotated while its processes write to it, and may be lost."""

import os
import time
from pathlib import Path

import psutil
import pytest

from mcore_rl.process.log_files import find_segments, rotate_logs
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from tests.scenarios.rollout.test_native_forward import generate, save_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
DEADLINE_S = 60.0


def logs_of(engine: EngineProcess) -> dict[str, str]:
    """Return the log that the server and its scheduler write to, by the process's name."""
    server = psutil.Process(engine.pid)
    found = {"server": os.readlink(f"/proc/{server.pid}/fd/1")}
    for process in server.children(recursive=True):
        if "sglang::scheduler" in " ".join(process.cmdline()):
            found["scheduler"] = os.readlink(f"/proc/{process.pid}/fd/1")
    return found


def test_server_and_scheduler_turn_to_the_newest_log(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path / "model")
    log = tmp_path / "engine.log"
    with (
        rotate_logs(2000),
        EngineProcess(EngineSpec(str(tmp_path / "model"), str(log))) as engine,
    ):
        deadline_s = time.monotonic() + DEADLINE_S
        newest = {"server": str(log), "scheduler": str(log)}
        while len(find_segments(log)) < 3 or logs_of(engine) != newest:
            assert time.monotonic() < deadline_s, (find_segments(log), logs_of(engine))
            generate(engine.url, [[5, 6, 7]] * 4, logprob_start_len=-1)
        segments = find_segments(log)
        assert "Prefill batch" in "".join(p.read_text() for p in segments[1:]), "the scheduler's"
        assert engine.tail(500).count("\n") > len(log.read_text().splitlines())


def test_an_engine_whose_log_cannot_be_written_serves(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path / "model")
    log = tmp_path / "engine.log"
    log.symlink_to("/dev/full")
    with EngineProcess(EngineSpec(str(tmp_path / "model"), str(log))) as engine:
        for _ in range(3):
            generate(engine.url, [[5, 6, 7]] * 4, logprob_start_len=-1)
        assert engine.is_alive() and engine.is_healthy()
