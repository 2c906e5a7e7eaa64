"""Measures a run's start: the seconds from the command to the first token of a rollout.

`mcore-rl train` with the tiny recipe and random weights starts so many times. The first token is
the first prefill of the engine after its weights are linked. CPU seconds are those of all processes
of the run until then, which other work on the machine leaves nearly as they are; they are sampled,
so what a process used in its last moments is missing. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from cpu_time import cpu_seconds, with_children

COMMAND = (sys.executable, "-m", "mcore_rl.cli")
LINKED = "is linked"
PREFILL = "Prefill batch"
POLL_S = 0.1
ENDING_S = 60.0


class Used(NamedTuple):
    """The CPU seconds of a process, and what it is called."""

    name: str
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one start")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="startup_") as name:
        folder = Path(name)
        command = (*COMMAND, "data", "arithmetic", "--out", str(folder / "data"))
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=args.timeout)
        starts = []
        for number in range(args.repeats):
            starts.append(measure(folder, folder / f"run{number}", args.timeout))
            print(starts[-1], flush=True)
    names = [key for key in starts[0] if key != "processes"]
    figures: dict[str, Any] = {n: round(median(start[n] for start in starts), 2) for n in names}
    figures["least_s"] = min(start["first_token_s"] for start in starts)
    figures["processes"] = starts[-1]["processes"]
    print(json.dumps(figures))


def measure(folder: Path, run: Path, timeout_s: float) -> dict[str, Any]:
    """Start a run in folder `run`, stop it at its first token, and return the figures."""
    data = folder / "data"
    settings = (
        "recipe=tiny_moe_grpo",
        f"run.dir={run}",
        f"model.path={data / 'model'}",
        "model.init=random",
        f"data.train=[{data / 'train.parquet'}]",
        f"eval.data=[{data / 'heldout.parquet'}]",
        "eval.every_steps=0",
    )
    began_s = time.perf_counter()
    output = run.with_suffix(".out").open("w")
    process = subprocess.Popen((*COMMAND, "train", *settings), stdout=output, stderr=output)
    try:
        cpu: dict[int, Used] = {}
        num_warm_up = 0
        phases: dict[str, float] = {}
        while "first_token_s" not in phases:
            now_s = time.perf_counter() - began_s
            if process.poll() is not None or now_s > timeout_s:
                said = run.with_suffix(".out").read_text()[-2000:]
                raise RuntimeError(f"no token after {now_s:.0f} s of {timeout_s:.0f} s: {said}")
            cpu |= used_by(process.pid)
            num_warm_up = _note_phases(run / "logs", now_s, num_warm_up, phases)
            time.sleep(POLL_S)
    finally:
        _stop(process)
        output.close()
    dearest = sorted(cpu.items(), key=lambda item: -item[1].seconds)
    figures = {name: round(seconds, 2) for name, seconds in phases.items()}
    return {
        **figures,
        "cpu_s": round(sum(used.seconds for used in cpu.values()), 2),
        "processes": {f"{pid} {used.name}": round(used.seconds, 2) for pid, used in dearest[:12]},
    }


def _note_phases(logs: Path, now_s: float, num_warm_up: int, phases: dict[str, float]) -> int:
    """Add to `phases` the seconds of those that were reached since the last call.

    Returns the engine's prefills before it was linked; `num_warm_up` is the last answer.
    """
    controller = logs / "controller.log"
    engine = logs / "sglang_0.log"
    text = controller.read_text() if controller.exists() else ""
    num_prefills = engine.read_text().count(PREFILL) if engine.exists() else 0
    reached = {
        "imported_s": "start-up" in text,
        "ray_s": ": node " in text,
        "linked_s": LINKED in text,
        "first_token_s": "linked_s" in phases and num_prefills > num_warm_up,
    }
    for name, is_reached in reached.items():
        if is_reached:
            phases.setdefault(name, now_s)
    return num_warm_up if "linked_s" in phases else num_prefills


def used_by(pid: int) -> dict[int, Used]:
    """Return what a process and all that it started have used, by pid."""
    used: dict[int, Used] = {}
    try:
        family = with_children([pid])
    except psutil.NoSuchProcess:
        return used
    for process in family:
        with suppress(psutil.Error):  # it ended meanwhile
            name = " ".join(process.cmdline()[:4])[-48:]
            used[process.pid] = Used(name, cpu_seconds(process))
    return used


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
