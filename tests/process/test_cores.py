"""A process takes its part of the machine's cores."""

import os
import subprocess
import sys

import psutil
import pytest

from mcore_rl.process.cores import check_threads, num_cores, take_cores


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the ways to wait unset, and have what a test sets undone after it."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("cores", "sharers", "threads"), [(8, 1, "8"), (8, 3, "2"), (2, 5, "1")])
def test_processes_share_the_cores(cores: int, sharers: int, threads: str, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray sets it
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: cores)
    take_cores(sharers)
    assert os.environ["OMP_NUM_THREADS"] == threads
    assert os.environ["OMP_WAIT_POLICY"] == "passive"


def test_whoever_sets_threads_has_quiet_ones(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    take_cores(1, "3")
    assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]) == ("3", "passive")


def test_a_way_to_wait_that_is_set_stays(monkeypatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    take_cores(1)
    assert os.environ["OMP_WAIT_POLICY"] == "active" and "GOMP_SPINCOUNT" not in os.environ


def test_a_number_of_turns_to_spin_that_is_set_stays(monkeypatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    take_cores(1)
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"]) == ("passive", "7")


def test_two_threads_of_a_core_are_one(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)
    assert num_cores() == 8


def test_torch_reads_it() -> None:
    code = (
        "from mcore_rl.process.cores import num_cores, take_cores; take_cores(1); import torch;"
        " assert torch.get_num_threads() == num_cores()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


@pytest.mark.parametrize("text", ["4096", "0", "-1", "4,2", "many", "\u0664"])
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"])
def test_more_threads_than_a_process_can_have_are_refused(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    expected = f"{name}={text}: it is for each process, and must be a number from 1 to 128"
    with pytest.raises(ValueError, match=expected):
        check_threads({name: text})


@pytest.mark.parametrize(("cpus", "most"), [(2, 64), (32, 128)])
def test_as_many_threads_as_are_of_use_are_taken(
    cpus: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    for text in ("", "1", str(most)):
        check_threads({"OMP_NUM_THREADS": text})
    with pytest.raises(ValueError, match=f"from 1 to {most}"):
        check_threads({"OMP_NUM_THREADS": str(most + 1)})


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("mcore_rl.cli", ["report", "/nowhere"]),
        ("mcore_rl.cli", ["doctor", "--json"]),
        ("checkpoint_tools.cli", ["inspect", "/nowhere"]),
        ("checkpoint_tools.cli", ["from-hf", "/nowhere", "/nowhere/out"]),
        ("mcore_rl.tools.doctor", ["--json"]),
        ("mcore_rl.tools.doctor.warm_start", ["--out", "/nowhere"]),
    ],
)
def test_every_command_refuses_them(module: str, words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1000000"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "OMP_NUM_THREADS=1000000: it is for each process, and must be" in done.stderr
