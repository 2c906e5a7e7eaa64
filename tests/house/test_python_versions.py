"""Pinned packages exist for each Python version that the project accepts, and fit together."""

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.policy import ROOT

PYTHONS = ("3.12", "3.13")
"""Those that megatron-core declares; on 3.11 it and its optimizers are installed all the same."""
PLATFORM = "x86_64-manylinux_2_34"
UNREACHABLE = ("dns error", "Connection refused", "Could not connect", "tcp connect error")


def resolve(python: str, folder: Path, *requirements: str) -> str:
    """Have uv choose a distribution of each requirement; nothing is downloaded but metadata."""
    command = [sys.executable, "-m", "uv", "pip", "install", "--dry-run", "--no-deps"]
    command += ["--python-version", python, "--python-platform", PLATFORM]
    command += ["--target", str(folder / "target"), *requirements]
    return run_uv(command).stderr


def run_uv(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    if done.returncode and any(words in done.stderr for words in UNREACHABLE):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.parametrize("python", ["3.11", *PYTHONS])
def test_the_pinned_versions_exist(python: str, tmp_path: Path) -> None:
    lines = (ROOT / "requirements/cpu.txt").read_text().splitlines()
    torch = next(line for line in lines if line.startswith("torch=="))
    from_source = ("megatron-core==", "emerging-optimizers==") if python == "3.11" else ()
    apart = [torch, *(line for line in lines if line.startswith(from_source))]
    others = tmp_path / "cpu.txt"
    others.write_text("\n".join(line for line in lines if line not in apart))
    files = ("-r", str(others), "-r", "requirements/dev.txt")
    assert "+ transformers==" in resolve(python, tmp_path, *files, torch.partition("+")[0])


@pytest.mark.parametrize(
    ("python", "extras"),
    [
        pytest.param("3.12", ("cpu", "tracking", "dev"), marks=pytest.mark.slow),
        pytest.param("3.13", ("cpu", "tracking", "dev"), marks=pytest.mark.slow),
        pytest.param("3.12", ("gpu", "tracking"), marks=pytest.mark.slow),
        pytest.param("3.13", ("gpu", "tracking"), marks=pytest.mark.slow),
        pytest.param("3.12", ("cpu", "clearml", "swanlab"), marks=pytest.mark.slow),
        pytest.param("3.12", ("gpu", "clearml", "swanlab", "trackio"), marks=pytest.mark.slow),
    ],
)
def test_the_extras_resolve_together_with_all_they_require(
    python: str, extras: tuple[str, ...], tmp_path: Path
) -> None:
    chosen = [word for extra in extras for word in ("--extra", extra)]
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", *chosen]
    command += ["--python-version", python, "--python-platform", PLATFORM]
    answer = run_uv([*command, "-o", str(tmp_path / "lock.txt")])
    assert not answer.returncode and "torch==" in (tmp_path / "lock.txt").read_text()


def test_a_version_that_does_not_exist_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"no version of numpy==0\.0\.1"):
        resolve("3.12", tmp_path, "numpy==0.0.1")


def test_the_accepted_versions_are_those_that_are_resolved() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    major, minor = PYTHONS[-1].split(".")
    assert project["requires-python"] == f">=3.11,<{major}.{int(minor) + 1}"
