"""A warden's root shows the runtimes that it was given, read-only, and nothing else."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.services.sandbox import isolation
from mcore_rl.services.sandbox.box import ProgramBox
from mcore_rl.services.sandbox.languages import readable_paths
from mcore_rl.services.sandbox.limits import BoxStep, Limits, RunRecord, SandboxError
from mcore_rl.services.sandbox.worker import Worker


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    shown = tmp_path_factory.mktemp("shown") / "file"
    shown.write_text("shown")
    (shown.parent / "hidden").write_text("hidden")
    made = Worker([*readable_paths({}), str(shown)])
    yield made
    made.close()


def run(worker: Worker, source: str) -> RunRecord:
    with ProgramBox(worker, Limits()) as box:
        box.put({"program.py": source.encode()})
        return box.run(BoxStep(program=f"{isolation.BOX}/program.py"))


def test_the_root_has_only_runtimes(worker: Worker) -> None:
    names = eval(run(worker, "import os; print(os.listdir('/'))").stdout)
    wanted = {path.split("/")[1] for path in readable_paths({})} | {"box", "dev", "tmp"}
    assert set(names) == wanted
    devices = eval(run(worker, "import os; print(os.listdir('/dev'))").stdout)
    assert set(devices) == {"null", "zero", "full", "urandom", "random", "shm"}


def test_a_file_is_shown_without_its_neighbors(worker: Worker, tmp_path_factory: object) -> None:
    source = (
        "import glob, os\nfor folder, _, names in os.walk('/tmp/'):\n"
        "  print([n for n in names if n in ('file', 'hidden')])"
    )
    seen = run(worker, source).stdout
    assert b"'file'" in seen
    assert b"hidden" not in seen


def test_a_program_is_nobody_and_alone(worker: Worker) -> None:
    source = "import os; print(os.getuid(), os.getgid(), os.getgroups(), os.getpid())"
    assert run(worker, source).stdout == b"1000 1000 [1000] 2\n" or (
        os.geteuid() == 0 and run(worker, source).stdout == b"1000 1000 [] 2\n"
    )


def test_a_box_begins_empty(worker: Worker) -> None:
    assert run(worker, "open('left', 'w').write('x')").status == 0
    assert run(worker, "import os; print(os.listdir('.'))").stdout == b"['program.py']\n"


def test_a_path_that_is_not_there_is_an_error_of_the_sandbox() -> None:
    with pytest.raises(SandboxError, match=r"no sandbox .*/none/such"):
        Worker(["/usr", "/none/such"])


def test_the_host_keeps_its_mounts(worker: Worker) -> None:
    mounts = Path("/proc/self/mounts").read_text()
    assert "/box" not in mounts
