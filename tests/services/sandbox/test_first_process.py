"""The first process of a box reaps orphans, and no program can end or signal it."""

from collections.abc import Iterator

import pytest

from mcore_rl.services.sandbox import first_process
from mcore_rl.services.sandbox.limits import Limits, RunVerdict
from mcore_rl.services.sandbox.worker import Worker
from tests.support.sandboxes import make_worker, run


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = make_worker()
    yield made
    made.close()


def test_orphans_are_reaped_while_the_program_runs(worker: Worker) -> None:
    source = (
        "import os\nfor i in range(200):\n"
        " if os.fork() == 0:\n  if os.fork() == 0: os._exit(0)\n  os._exit(0)\n"
        " os.wait()\nprint('all')"
    )
    assert run(worker, source, limits=Limits(processes=8, wall_s=60)).stdout == b"all\n"


@pytest.mark.parametrize("number", [2, 9, 15, 17, 19])
def test_it_cannot_be_signaled(worker: Worker, number: int) -> None:
    source = (
        f"import os, time\ntry: os.kill(1, {number})\nexcept PermissionError: pass\n"
        "time.sleep(0.1)\nprint('here')"
    )
    assert run(worker, source).stdout == b"here\n"


def test_processor_time_of_a_step_is_its_own(worker: Worker) -> None:
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    assert run(worker, burn).cpu_s > 0.25
    assert run(worker, "pass").cpu_s < 0.25
    assert first_process._children_cpu_s() >= 0


def test_a_program_that_stops_itself_ends_at_its_deadline(worker: Worker) -> None:
    record = run(worker, "import os; os.kill(os.getpid(), 19)", limits=Limits(wall_s=0.5))
    assert record.verdict == RunVerdict.TIMEOUT
