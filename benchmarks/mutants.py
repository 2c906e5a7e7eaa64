"""Plants small faults in the code, one at a time, and counts those that no test notices.

    copy of the repository -> a fault in one file -> tests of that file, then of its folder
                                    killed: a test fails | survived: all pass | slow: they never end

Faults come in an order that is random but the same in every run, so that a part of them is a fair
sample. Results are appended to .mutants/results.jsonl; the next run goes on behind them. A fault is
tried again once its file has changed, and one that survived once its tests have. Each is tried in a
fork of this process, which has imported what tests import and nothing of the project.

Prints survivors as file:line with the lines that differ, and last a JSON object with the score.
"""

import argparse
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mutations import Mutation, describe, list_mutations, plant

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".mutants"
RESULTS = WORK / "results.jsonl"
TESTS = {
    "mcore_rl/algo": ("tests/algo", "tests/scenarios/algo"),
    "mcore_rl/loops": ("tests/loops",),
    "mcore_rl/run/roles": ("tests/run/roles",),
    "mcore_rl/weights/plan": ("tests/weights/plan",),
    "mcore_rl/weight_sync": ("tests/weight_sync",),
}
"""Where faults are planted, and the tests that are meant to notice them, the nearest first."""
LEFT_OUT = "not gloo and not e2e and not slow and not gpu"
PRELOADED = ("torch", "numpy", "pytest", "hypothesis", "omegaconf", "hydra", "aiohttp", "ray")
STARTING_S = 30.0
TIMES = 4.0
"""A fault may make tests this many times as slow, and the start of a process this long."""


@dataclass(frozen=True)
class Mutant:
    """A fault, its file, and the digests of what decides its fate."""

    file: str
    mutation: Mutation
    file_digest: str
    tests_digest: str

    @property
    def key(self) -> str:
        """Return what names the fault as long as its file stays as it is."""
        return f"{self.file_digest}:{self.mutation.operator}:{self.mutation.occurrence}"


def main() -> int:
    parser = argparse.ArgumentParser(description="plant faults, one at a time")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no fault later")
    parser.add_argument("--only", nargs="+", default=list(TESTS), help="of: " + " ".join(TESTS))
    args = parser.parse_args()
    unknown = set(args.only) - TESTS.keys()
    if unknown:
        parser.error(f"--only {' '.join(sorted(unknown))}: faults are planted in {list(TESTS)}")
    deadline = time.monotonic() + 60 * args.minutes
    tree = copy_repository()
    for name in PRELOADED:
        importlib.import_module(name)
    mutants = sorted(list_mutants(args.only), key=lambda each: _digest(each.key))
    known = read_results(RESULTS)
    patience: dict[str, float] = {}
    for mutant in mutants:
        if is_decided(mutant, known):
            continue
        if time.monotonic() > deadline:
            break
        row = try_mutant(tree, mutant, patience)
        known[mutant.key] = row
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print(summarize(mutants, known))
    return 0


def list_mutants(folders: Sequence[str]) -> Iterator[Mutant]:
    """Yield every fault that can be planted in the folders."""
    for folder in folders:
        test_files = [file for tests in TESTS[folder] for file in _python_files(tests)]
        tests_digest = _digest(*(file.read_text() for file in test_files))
        for file in _python_files(folder):
            source = file.read_text()
            for mutation in list_mutations(source):
                name = str(file.relative_to(ROOT))
                yield Mutant(name, mutation, _digest(name, source), tests_digest)


def try_mutant(tree: Path, mutant: Mutant, patience: dict[str, float]) -> dict[str, Any]:
    """Plant a fault in the copy, run its tests, and take the fault out again.

    `patience` holds seconds that tests take without a fault; RuntimeError if those fail.
    """
    target = tree / mutant.file
    source = target.read_text()
    mutated = plant(source, mutant.mutation)
    row = {"key": mutant.key, "file": mutant.file, **asdict(mutant.mutation)}
    row |= {"tests_digest": mutant.tests_digest}
    if mutated is None:
        return row | {"outcome": "none"}
    outcome = "survived"
    for tests in tests_of(mutant.file):
        if tests not in patience:
            patience[tests] = _time_tests(tree, tests)
    try:
        _write(target, mutated)
        for tests in tests_of(mutant.file):
            outcome = run_tests(tree, tests, STARTING_S + TIMES * patience[tests])
            if outcome != "survived":
                break
    finally:
        _write(target, source)
    return row | {"outcome": outcome, "diff": describe(source, mutated)}


def tests_of(file: str) -> list[str]:
    """Return the tests of a file, the nearest first."""
    folders = next(TESTS[part] for part in TESTS if file == part or file.startswith(f"{part}/"))
    nearest = f"{folders[0]}/test_{Path(file).stem}.py"
    return [nearest, *folders] if (ROOT / nearest).is_file() else list(folders)


def run_tests(tree: Path, tests: str, patience_s: float) -> str:
    """Return survived, killed or slow for the copy as it is."""
    pid = os.fork()
    if pid == 0:
        _run_pytest(tree, tests)
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return "survived" if status == 0 else "killed"
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "slow"


def copy_repository() -> Path:
    """Return a fresh copy of the files that git tracks or would track."""
    tree = WORK / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        source, target = ROOT / name, tree / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    return tree


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """Return the newest result of each fault; a line that a kill cut off is passed over."""
    rows = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["key"]] = row
    return rows


def is_decided(mutant: Mutant, known: dict[str, dict[str, Any]]) -> bool:
    """Return whether a fault need not be tried again."""
    row = known.get(mutant.key)
    if row is None:
        return False
    return row["outcome"] != "survived" or row["tests_digest"] == mutant.tests_digest


def summarize(mutants: Sequence[Mutant], known: dict[str, dict[str, Any]]) -> str:
    """Return the survivors by file and line, then a JSON object with the score of each folder."""
    rows = [known[mutant.key] for mutant in mutants if is_decided(mutant, known)]
    rows = [row for row in rows if row["outcome"] != "none"]
    survivors = [row for row in rows if row["outcome"] == "survived"]
    survivors.sort(key=lambda row: (row["file"], row["line"], row["operator"]))
    lines = [
        f"{row['file']}:{row['line']}: {row['operator']}\n{row['diff']}\n" for row in survivors
    ]
    score: dict[str, Any] = {}
    for folder in TESTS:
        own = [row for row in rows if row["file"].startswith(folder)]
        if own:
            noticed = sum(row["outcome"] != "survived" for row in own)
            score[folder] = {"tried": len(own), "noticed": round(noticed / len(own), 3)}
    left = len(mutants) - sum(is_decided(mutant, known) for mutant in mutants)
    return "\n".join([*lines, json.dumps({"folders": score, "not tried": left})])


def _time_tests(tree: Path, tests: str) -> float:
    started = time.monotonic()
    outcome = run_tests(tree, tests, 600.0)
    if outcome != "survived":
        raise RuntimeError(f"{tests} ended as {outcome} without a fault: mend them first")
    return time.monotonic() - started


def _run_pytest(tree: Path, tests: str) -> None:
    """Run tests in this process, a fork, which ends with pytest's status."""
    os.setsid()
    os.chdir(tree)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".") != ROOT)]
    os.environ["PYTHONPATH"] = str(tree)
    import pytest

    arguments = [*("-x", "-q", "-m", LEFT_OUT), *("-p", "no:cacheprovider", "-p", "no:xdist")]
    os._exit(pytest.main([*arguments, "--rootdir", str(tree), tests]))


def _write(file: Path, source: str) -> None:
    """Write a module, and forget its bytecode, which Python would take if size and second agree."""
    file.write_text(source)
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        compiled.unlink()


def _python_files(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
