"""A sandbox in a cgroup of version 2 that was handed to it, as a service of systemd is.

It needs root, and a kernel whose controllers are those of version 2.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ordinary_user import NOBODY, open_python
from tests.support.policy import ROOT as REPOSITORY

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpu", "memory", "pids")
TIMEOUT_S = 300.0
PROGRAM = """
import json, os, sys
from pathlib import Path
from mcore_rl.services.sandbox.execution import CodeRequest
from mcore_rl.services.sandbox.limits import Limits
from mcore_rl.services.sandbox.service import Sandbox, SandboxOptions

cgroup, user = Path(sys.argv[1]), int(sys.argv[2])
(cgroup / "cgroup.procs").write_text(str(os.getpid()))
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
sandbox = Sandbox(SandboxOptions(workers=2))
sandbox.warm_up()
limits = Limits(wall_s=60, cpu_s=60, memory_mib=64, processes=8)
share = "import os, time; os.fork(); os.fork(); held = b'x' * (40 << 20); time.sleep(20)"
verdict = sandbox.run_code(CodeRequest(share, limits=limits)).verdict
here = Path("/proc/self/cgroup").read_text().strip().removeprefix("0::")
print(json.dumps({"cgroups": sandbox.has_cgroups(), "verdict": verdict, "here": here}))
sandbox.close()
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Make a cgroup whose controllers are on and which has no process yet."""
    listed = ROOT / "cgroup.controllers"
    if not listed.exists() or not set(CONTROLLERS) <= set(listed.read_text().split()):
        pytest.skip("the controllers of this kernel are not those of cgroup version 2")
    if os.geteuid() != 0:
        pytest.skip("only root makes a cgroup at the top")
    if not open_python():
        pytest.skip("no Python 3.11 here that every user may start")
    (ROOT / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))
    made = ROOT / f"mcore_rl_test_{os.getpid()}"
    made.mkdir()
    yield made
    for folder in (*made.iterdir(), made):
        if folder.is_dir():
            folder.rmdir()


def run_in(cgroup: Path, user: int = 0) -> dict[str, Any]:
    """Start a sandbox in a cgroup; return what it says, and of a program of 160 MiB in four."""
    done = subprocess.run(
        [open_python(), "-c", PROGRAM, str(cgroup), str(user)],
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_alone_in_its_cgroup_it_bounds_programs(cgroup: Path) -> None:
    told = run_in(cgroup)
    assert (told["cgroups"], told["verdict"]) == (True, "memory")
    assert told["here"].startswith(f"/{cgroup.name}/mcore_rl_caller_")
    assert [path.name for path in cgroup.glob("mcore_rl_sandbox_*")] == []


def test_an_ordinary_user_who_was_given_the_cgroup_may_too(cgroup: Path) -> None:
    for path in (cgroup, cgroup / "cgroup.procs", cgroup / "cgroup.subtree_control"):
        os.chown(path, NOBODY, NOBODY)
    told = run_in(cgroup, NOBODY)
    assert (told["cgroups"], told["verdict"]) == (True, "memory")


def test_beside_another_process_it_does_without_and_stays_where_it_was(cgroup: Path) -> None:
    with subprocess.Popen(["sleep", "300"]) as other:
        (cgroup / "cgroup.procs").write_text(str(other.pid))
        told = run_in(cgroup)
        other.kill()
    assert (told["cgroups"], told["here"]) == (False, f"/{cgroup.name}")
    assert [path for path in cgroup.iterdir() if path.is_dir()] == []
