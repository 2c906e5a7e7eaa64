"""A program runs as in an interpreter of its own, with its limits and no more than it needs."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.services.sandbox import first_process
from mcore_rl.services.sandbox.box import ProgramBox
from mcore_rl.services.sandbox.languages import readable_paths
from mcore_rl.services.sandbox.limits import BoxStep, Limits, RunRecord, SandboxError
from mcore_rl.services.sandbox.worker import Worker

PROGRAMS = {
    "exit status": "import sys\nprint('out'); sys.exit(7)",
    "exit text": "raise SystemExit('a reason')",
    "exit none": "raise SystemExit",
    "exit large": "raise SystemExit(259)",
    "error": "def f():\n    return 1 / 0\n\nf()",
    "error in a chain": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError(1) from e",
    "syntax": "x = 1\ny = (\n",
    "output without a line's end": "print('a', end='')",
    "both": "import sys\nprint(1)\nprint(2, file=sys.stderr)",
    "input": "import sys\nprint(input(), sys.stdin.read())",
    "atexit": "import atexit\natexit.register(print, 'bye')\nprint('hello')",
    "thread": "import threading, time\ndef f():\n    time.sleep(0.2); print('late')\n"
    "threading.Thread(target=f).start()",
    "daemon": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,),"
    " daemon=True).start()\nprint('x')",
    "destructor": "class A:\n    def __del__(self): print('gone')\na = A()\na.a = a",
    "open file": "f = open('out', 'w')\nf.write('x' * 9)\nimport os\nprint(os.path.exists('out'))",
    "main": "import __main__, sys\nprint(__name__, __main__.__name__, "
    "sys.modules['__main__'].__dict__ is globals())",
    "pickle": "import pickle\nclass A: x = 1\nprint(pickle.loads(pickle.dumps(A())).x)",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(A(1))",
    "pool": "from concurrent.futures import ThreadPoolExecutor\n"
    "with ThreadPoolExecutor(2) as p: print(list(p.map(abs, [-1, 2])))",
    "asyncio": "import asyncio\nasync def f(): return 3\nprint(asyncio.run(f()))",
    "recursion": "import sys\nsys.setrecursionlimit(3000)\ndef f(n): return n and 1 + f(n - 1)\n"
    "print(f(2500))",
    "fork": "import os, sys\nsys.stdout.flush()\nif os.fork() == 0:\n    print('child')\n"
    "    sys.exit(0)\nos.wait()\nprint('parent')",
    "subprocess": "import subprocess\n"
    "print(subprocess.run(['echo', 'x'], capture_output=True).stdout)",
    "unicode": "print('\\u00e9\\U0001f600', input())",
    "signal": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "broken pipe": "import signal\nprint(signal.getsignal(signal.SIGPIPE), signal.getsignal(2))",
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker(readable_paths({}))
    yield made
    made.close()


def run(worker: Worker, source: str, stdin: bytes = b"", limits: Limits | None = None) -> RunRecord:
    limits = limits or Limits()
    with ProgramBox(worker, limits) as box:
        box.put({"program.py": source.encode()})
        return box.run(BoxStep(program="/box/program.py", limits=limits), stdin)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_as_in_an_interpreter_of_its_own(
    worker: Worker, name: str, tmp_path: Path
) -> None:
    stdin = "line é\nmore\n".encode()
    path = tmp_path / "program.py"
    path.write_text(PROGRAMS[name])
    alone = subprocess.run(
        [sys.executable, "-I", "-B", str(path)],
        input=stdin,
        capture_output=True,
        timeout=60,
        cwd=tmp_path,
        env={"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"},
    )
    record = run(worker, PROGRAMS[name], stdin)
    assert record.stdout == alone.stdout
    assert record.stderr == alone.stderr.replace(bytes(path), b"/box/program.py")
    assert record.status == alone.returncode if alone.returncode >= 0 else 128 - alone.returncode


def test_a_program_finds_the_files_beside_it(worker: Worker) -> None:
    with ProgramBox(worker, Limits()) as box:
        box.put({"program.py": b"import helper; print(helper.x)", "helper.py": b"x = 5"})
        assert box.run(BoxStep(program="/box/program.py")).stdout == b"5\n"


def test_programs_leave_nothing_in_each_other(worker: Worker) -> None:
    run(
        worker,
        "import sys, json, builtins\njson.dumps = None\nbuiltins.len = None\nsys.path.clear()",
    )
    source = "import json, sys; print(len(json.dumps(1)), len(sys.path) > 1, 'gc' in sys.modules)"
    assert run(worker, source).stdout == b"1 True False\n"


def test_a_limit_above_the_machines_is_an_error_of_the_sandbox() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    source = (
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))\n"
        "from mcore_rl.services.sandbox.service import run_program\nprint(run_program('print(1)'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "SandboxError" in done.stderr
    assert "RLIMIT_NOFILE=64 is above the hard limit 50" in done.stderr
    assert (soft, hard) == resource.getrlimit(resource.RLIMIT_NOFILE)


def test_descriptors_are_placed_whatever_their_numbers_were() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            first = os.dup2(writer, 1)
            first_process.place_descriptors([reader, first, 0, writer])
            os.write(3, b"x")
            os._exit(0 if os.read(0, 1) == b"x" else 3)
        finally:
            os._exit(4)
    os.close(reader)
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0


def test_a_command_that_is_not_there_is_an_error_of_the_sandbox(worker: Worker) -> None:
    box = ProgramBox(worker, Limits())
    with box, pytest.raises(SandboxError, match="No such file"):
        box.run(BoxStep(command=("/none/such",)))
