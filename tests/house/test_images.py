"""Dockerfiles copy what is there and what .dockerignore lets through, in the locked versions."""

import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

import pytest

from tests.support.policy import ROOT, read, tracked

DOCKERFILES = ("Dockerfile", "Dockerfile.rocm")


def list_copied(dockerfile: str) -> Iterator[str]:
    """Yield the sources of each COPY from the build's folder, not from another stage."""
    lines = dockerfile.replace("\\\n", " ").splitlines()
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:1] == ["COPY"] and not any(word.startswith("--from=") for word in words):
            yield from (word for word in words[1:-1] if not word.startswith("--"))


def is_ignored(path: str, patterns: Sequence[str]) -> bool:
    """Return whether Docker leaves a path out: the last pattern that fits it or a parent decides.

    https://docs.docker.com/build/concepts/context/#dockerignore-files
    """
    pure = PurePosixPath(path)
    ancestors = [str(part) for part in (pure, *pure.parents) if str(part) != "."]
    ignored = False
    for pattern in patterns:
        name = pattern.removeprefix("!").strip("/")
        if any(_fits(each, name) for each in ancestors):
            ignored = not pattern.startswith("!")
    return ignored


def _fits(path: str, pattern: str) -> bool:
    """Return whether a pattern fits a whole path; "*" and "?" stay within a folder's name."""
    parts, wanted = path.split("/"), pattern.split("/")
    if wanted[0] == "**":
        return any(_fits("/".join(parts[i:]), "/".join(wanted[1:])) for i in range(len(parts)))
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


PATTERNS = [line for line in read(".dockerignore").splitlines() if line and line[0] != "#"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_what_is_copied_comes_through(dockerfile: str) -> None:
    copied = list(list_copied(read(dockerfile)))
    assert len(copied) > 5
    lost = [
        str(path)
        for source in copied
        for path in ([source] if not (ROOT / source).is_dir() else _files_below(source))
        if not (ROOT / path).exists() or is_ignored(str(path), PATTERNS)
    ]
    assert not lost, f"{dockerfile} copies what .dockerignore leaves out: {lost[:5]}"


def _files_below(folder: str) -> list[Path]:
    return [path for path in tracked("") if str(path).startswith(f"{folder}/")]


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("tests/test_a.py", True),
        ("data/arithmetic/train.jsonl", True),
        ("mcore_rl/cli.py", False),
        ("mcore_rl/run/__pycache__/a.pyc", True),
        ("requirements/gpu.txt", False),
        (".venv/bin/python", True),
    ],
)
def test_the_context_has_the_package_alone(path: str, ignored: bool) -> None:
    assert is_ignored(path, PATTERNS) == ignored


def test_a_lost_folder_is_noticed() -> None:
    without = [pattern for pattern in PATTERNS if pattern != "!launch"]
    assert is_ignored("launch/cli.py", without)


LOCKED = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", read("requirements/gpu.txt"), re.MULTILINE))
RECORDER = """#!/bin/sh
echo "$NVTE_PYTORCH_FORCE_BUILD $CPATH $@" >> "$(dirname "$0")/calls"
case $1 in -c) echo /site/nvidia ;; esac
"""


def test_the_image_names_no_version_but_the_locked_ones() -> None:
    named = re.findall(r'"?([a-z][\w-]*)(?:\[[\w,]+\])?==([\w.]+)"?', read("Dockerfile"))
    wrong = {name: version for name, version in named if LOCKED.get(name) != version}
    assert not wrong, f"Dockerfile and requirements/gpu.txt differ: {wrong}"
    assert "requirements/te_wheel" in list_copied(read("Dockerfile"))


def test_transformer_engine_is_built_for_the_locked_torch(tmp_path: Path) -> None:
    """The script's Python only writes down what it is asked, as the build takes minutes."""
    python = tmp_path / "python"
    python.write_text(RECORDER)
    python.chmod(0o755)
    subprocess.run([ROOT / "requirements/te_wheel", python, "out"], check=True, timeout=60)
    *installs, _, build = (tmp_path / "calls").read_text().splitlines()
    assert f"torch=={LOCKED['torch']}" in installs[0]
    cuda = LOCKED["nvidia-cuda-runtime"].rpartition(".")[0]
    assert f"nvidia-cuda-crt=={cuda}.*" in installs[1]
    assert build.startswith(f"TRUE /site/nvidia/cu{cuda.partition('.')[0]}/include/cccl -m pip")
    assert build.endswith(f"out transformer-engine-torch=={LOCKED['transformer-engine-torch']}")
    named = re.findall(r"([a-z][\w-]*)==([\w.]+)(?= |$)", " ".join([*installs, build]))
    assert named
    wrong = {name: version for name, version in named if LOCKED.get(name) != version}
    assert not wrong, f"other versions than those of requirements/gpu.txt: {wrong}"
