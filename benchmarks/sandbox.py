"""Executions per second and their 99th percentile in the sandbox, beside bare subprocesses.

Python and C++, with a warm and a cold pool, in alternating rounds of one run; then a check for
leaks over many executions. The last line is one JSON object.

    python benchmarks/sandbox.py --executions 200 --leak-executions 2000
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from mcore_rl.services.sandbox.execution import CodeRequest
from mcore_rl.services.sandbox.limits import Limits, RunVerdict
from mcore_rl.services.sandbox.service import Sandbox, SandboxOptions

PYTHON = "print(sum(map(int, input().split())))"
CPP = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"
STDIN = "40 2\n"
LIMITS = Limits(wall_s=60, cpu_s=60)
COMPILE_S = 120.0
ROUNDS = 4
BATCH = 100


@dataclass
class Series:
    """Durations of executions, and the time that they took together; in seconds."""

    each_s: list[float] = field(default_factory=list)
    whole_s: float = 0.0

    def add(self, work: Callable[[], None], num: int, threads: int) -> None:
        def timed(_: int) -> float:
            began_s = time.perf_counter()
            work()
            return time.perf_counter() - began_s

        began_s = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            self.each_s += pool.map(timed, range(num))
        self.whole_s += time.perf_counter() - began_s

    def numbers(self) -> dict[str, float]:
        ordered = sorted(self.each_s)
        rank = min(int(len(ordered) * 0.99), len(ordered) - 1)
        return {
            "per_s": round(len(ordered) / self.whole_s, 2),
            "p50_ms": round(ordered[len(ordered) // 2] * 1000, 1),
            "p99_ms": round(ordered[rank] * 1000, 1),
            "executions": len(ordered),
        }


def run_bare_python(folder: Path) -> None:
    command = [sys.executable, "-I", "-B", str(folder / "program.py")]
    done = subprocess.run(command, input=STDIN, capture_output=True, text=True, check=True)
    assert done.stdout == "42\n"


def run_bare_cpp(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as out:
        command = ["g++", "-O2", "-std=gnu++17", str(folder / "program.cpp"), "-o", f"{out}/p"]
        subprocess.run(command, check=True)
        done = subprocess.run([f"{out}/p"], input=STDIN, capture_output=True, text=True, check=True)
    assert done.stdout == "42"


def run_boxed(sandbox: Sandbox, code: str, language: str) -> None:
    request = CodeRequest(code, language, STDIN, COMPILE_S, limits=LIMITS)
    result = sandbox.run_code(request)
    assert result.verdict == RunVerdict.OK, result
    assert result.ran is not None and result.ran.stdout.strip() == b"42"


def run_cold(code: str, language: str) -> None:
    sandbox = Sandbox(SandboxOptions(workers=1, max_sessions=0))
    try:
        run_boxed(sandbox, code, language)
    finally:
        sandbox.close()


def compare(num: int, threads: int, code: str, language: str) -> dict[str, dict[str, float]]:
    """Return the numbers of bare subprocesses, of a warm pool and of cold ones."""
    bare = {"python": run_bare_python, "cpp": run_bare_cpp}[language]
    series = {name: Series() for name in ("bare", "warm", "cold")}
    sandbox = Sandbox(SandboxOptions(workers=threads, max_sessions=0))
    sandbox.warm_up()
    try:
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            (folder / "program.py").write_text(PYTHON)
            (folder / "program.cpp").write_text(CPP)
            for _ in range(ROUNDS):
                part = max(num // ROUNDS, threads)
                series["bare"].add(lambda: bare(folder), part, threads)
                series["warm"].add(lambda: run_boxed(sandbox, code, language), part, threads)
                few = max(part // 10, threads)
                series["cold"].add(lambda: run_cold(code, language), few, threads)
    finally:
        sandbox.close()
    found = {name: each.numbers() for name, each in series.items()}
    for name in ("warm", "cold"):
        found[name]["of_bare"] = round(found[name]["per_s"] / found["bare"]["per_s"], 3)
    return found


def holdings(sandbox: Sandbox) -> dict[str, int]:
    """Return what this process and its wardens hold of the machine."""
    this = psutil.Process()
    family = [this, *this.children(recursive=True)]
    groups = [
        path
        for folder in Path("/sys/fs/cgroup").glob("*")
        for path in folder.rglob(f"mcore_rl_sandbox_{os.getpid()}_*")
        if path.is_dir()
    ]
    return {
        "descriptors": sum(process.num_fds() for process in family),
        "processes": len(family),
        "memory_kib": sum(process.memory_info().rss for process in family) >> 10,
        "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
        "cgroups": len(groups),
        "temporary_files": len(os.listdir(tempfile.gettempdir())),
        "kernel_objects": _open_inodes(),
    }


def _open_inodes() -> int:
    return int(Path("/proc/sys/fs/file-nr").read_text().split()[0])


def find_leaks(num: int, threads: int) -> dict[str, object]:
    """Run many programs; return what was held before and after them."""
    sandbox = Sandbox(SandboxOptions(workers=threads, max_sessions=0))
    try:
        sandbox.warm_up()
        series = Series()
        series.add(lambda: run_boxed(sandbox, PYTHON, "python"), 10 * threads, threads)
        before = holdings(sandbox)
        series = Series()
        for _ in range(num // BATCH):  # in batches, whose results take memory of their own
            series.add(lambda: run_boxed(sandbox, PYTHON, "python"), BATCH, threads)
        after = holdings(sandbox)
        return {"before": before, "after": after, **series.numbers()}
    finally:
        sandbox.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--executions", type=int, default=200, help="of Python (%(default)s)")
    parser.add_argument("--cpp-executions", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--leak-executions", type=int, default=2000, help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="at a time (%(default)s)")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    found: dict[str, object] = {
        "python": compare(args.executions, args.threads, PYTHON, "python"),
        "cpp": compare(args.cpp_executions, args.threads, CPP, "cpp"),
        "leaks": find_leaks(args.leak_executions, args.threads),
        "load_at_the_end": os.getloadavg()[0],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
