"""Rough places to start a command in, such as a folder that is full of strange names.

    Start(folder)  ->  PLACES[name](start) ...  ->  start.run(code, *arguments)

A place changes how a process will start; several may be put on top of each other.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcore_rl.cluster import worker_setup
from mcore_rl.cpu import engine_forks
from tests.support.ordinary_user import NOBODY, open_python
from tests.support.policy import ROOT

BAD_PROXY = "http://127.0.0.1:9"
"""Nobody listens there."""
LONG_NAME = "a_long_name_for_temporary_files_" * 4
ODD_NAME = "mit Leer zeichen, Größe (1) 模型"
SHADOWS = (
    "code",
    "copy",
    "json",
    "queue",
    "random",
    "socket",
    "stat",
    "tempfile",
    "token",
    "types",
)
"""Modules of the standard library that users like to name their own files after."""
UNSET = (
    *("HF_HOME", "LOGNAME", "USER", "PYTHONSAFEPATH", "NO_PROXY", "no_proxy"),
    *(engine_forks.FORKS, worker_setup.FORKS),
)
"""Variables of the test run itself, which a place must not get."""


def _plain_environment() -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if name not in UNSET}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass
class Start:
    """How a process will start. What it writes goes below `folder`, where every user may."""

    folder: Path
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=_plain_environment)
    work: str = "work"
    umask: int = 0o022
    most_files: int | None = None
    user: int | None = None
    modules: tuple[str, ...] = ()
    """Names of files in the working folder that end a process which imports them."""

    def __post_init__(self) -> None:
        self.environment |= {"HOME": f"{self.folder}/home", "TMPDIR": f"{self.folder}/tmp"}

    def run(
        self, code: str, *arguments: str, timeout_s: float
    ) -> "subprocess.CompletedProcess[str]":
        """Run Python code in the place."""
        return self.execute(
            [self.python, "-P", "-c", code, *arguments], self.make_work(), timeout_s
        )

    def make_work(self) -> Path:
        """Return the working folder, made with HOME and TMPDIR by the user who will work there."""
        work = self.folder / self.work
        if work.exists():
            return work
        named = [self.environment.get(name, "") for name in ("HOME", "TMPDIR")]
        made = self.execute(["mkdir", str(work), *filter(None, named)], self.folder, 60.0)
        assert made.returncode == 0, made.stderr
        for name in self.modules:
            (work / f"{name}.py").write_text(f"raise SystemExit('shadowed by {name}.py')\n")
        return work

    def execute(
        self, command: Sequence[str], folder: Path, timeout_s: float
    ) -> "subprocess.CompletedProcess[str]":
        """Run any program in the place, but for the folder, and in a folder that is there."""
        user: dict[str, Any] = {}
        if self.user is not None:
            user = {"user": self.user, "group": self.user, "extra_groups": []}
        return subprocess.run(
            command,
            cwd=folder,
            env=self.environment,
            umask=self.umask,
            preexec_fn=self._bound_files,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            **user,
        )

    def _bound_files(self) -> None:
        if self.most_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.most_files, self.most_files))


Place = Callable[[Start], None]


def name_dead_proxies(start: Start) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"):
        start.environment |= {name: BAD_PROXY, name.upper(): BAD_PROXY}


def name_a_dead_ray(start: Start) -> None:
    start.environment["RAY_ADDRESS"] = "127.0.0.1:9"


def be_an_ordinary_user(start: Start) -> None:
    """Give up root's rights, where the tests have them."""
    if os.geteuid() != 0:
        return
    start.user, start.python = NOBODY, open_python()
    packages = Path(torch.__file__).parents[1]
    start.environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(packages)))


def close_new_files_to_others(start: Start) -> None:
    start.umask = 0o077


def have_no_home(start: Start) -> None:
    start.environment.pop("HOME", None)


def work_in_an_odd_folder(start: Start) -> None:
    start.work = ODD_NAME


def keep_temporary_files_deep_down(start: Start) -> None:
    start.environment["TMPDIR"] = str(start.folder / LONG_NAME)


def speak_c(start: Start) -> None:
    for name in ("LANG", "LC_CTYPE"):
        start.environment.pop(name, None)
    start.environment["LC_ALL"] = "C"


def open_few_files(start: Start) -> None:
    start.most_files = 1024


def lie_among_shadows(start: Start) -> None:
    start.modules = SHADOWS


PLACES: Mapping[str, Place] = {
    "proxies": name_dead_proxies,
    "dead_ray": name_a_dead_ray,
    "ordinary_user": be_an_ordinary_user,
    "umask_077": close_new_files_to_others,
    "no_home": have_no_home,
    "odd_folder": work_in_an_odd_folder,
    "long_tmpdir": keep_temporary_files_deep_down,
    "c_locale": speak_c,
    "few_files": open_few_files,
    "shadows": lie_among_shadows,
}
"""In the order in which they are put on top of each other. An ordinary user can also not write to
what others made: the model, the data and this repository."""


@contextmanager
def open_ground() -> Iterator[Path]:
    """Yield a folder in which every user may make folders, as in /tmp; it is removed afterwards.

    pytest's own folders are closed to other users, so this one is not below them.
    """
    folder = Path(tempfile.mkdtemp(prefix="mcore_rl_ground_", dir="/tmp"))
    try:
        folder.chmod(0o1777)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
