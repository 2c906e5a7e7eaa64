"""Programs that mean harm, run for real: none reads, reaches or outlives, and memory stays bounded.

Each runs alone with cgroups, without, and in bubblewrap; and 64 at a time.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from mcore_rl.services.sandbox.execution import CodeRequest, CodeResult
from mcore_rl.services.sandbox.limits import MIB, Limits, RunVerdict
from mcore_rl.services.sandbox.service import Sandbox, SandboxOptions
from tests.support.hostile_programs import FILES_OUT, PRELUDE, PROGRAMS, Hostile

LIMITS = Limits(
    wall_s=2.0, cpu_s=2, memory_mib=128, processes=16, files_mib=16, output_kib=64, num_files=2000
)
CONCURRENCY = 64
SLOW = pytest.mark.slow
PLACES = ["cgroups", pytest.param("rlimits", marks=SLOW), pytest.param("bubblewrap", marks=SLOW)]
BROKEN = re.compile(rb"(Syntax|Name|Attribute|Type|Import)Error")
"""A program that fails for a reason of its own shows nothing about the sandbox."""
IN_THE_OPEN = (
    "processes of the host",
    "etc",
    "environment",
    "cgroups and sysfs",
    "engine on loopback",
    "abstract socket",
    "socket with a path",
    "AF_NETLINK",
)
"""Programs that get something outside of a sandbox and do no harm there."""
SLACK_BYTES = 64 * MIB
"""Above the limits: the workers' own memory, and what the machine does meanwhile."""


@pytest.fixture(scope="module", params=PLACES)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    has_outer = request.param == "bubblewrap"
    if has_outer and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed")
    use_cgroups = request.param == "cgroups"
    made = Sandbox(SandboxOptions(workers=2, use_cgroups=use_cgroups, bubblewrap=has_outer))
    yield made
    made.close()


@pytest.fixture(scope="module")
def prelude(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Open what programs would like to reach on the host; yield the prelude that names it."""
    path = str(tmp_path_factory.mktemp("sockets") / "s")
    abstract = f"mcore_rl_hostile_{os.getpid()}"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for address in (path, "\0" + abstract):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen()
        yield PRELUDE.format(
            port=server.getsockname()[1], abstract=abstract, path=path, home=str(Path.home())
        )


def run(sandbox: Sandbox, prelude: str, program: Hostile) -> CodeResult:
    source = prelude + program.source.replace("{{", "{").replace("}}", "}")
    return sandbox.run_code(CodeRequest(source, fetch=program.fetch, limits=LIMITS))


def check(result: CodeResult) -> None:
    assert result.verdict != RunVerdict.SANDBOX_ERROR, result.message
    assert result.ran is not None
    assert b"BAD" not in result.ran.stdout, result.ran.stdout[-500:]
    assert not BROKEN.search(result.ran.stderr), result.ran.stderr[-500:]
    assert len(result.ran.stdout) + len(result.ran.stderr) <= 2 * LIMITS.output_kib << 10
    assert result.ran.wall_s < LIMITS.wall_s + 15
    assert result.ran.memory_bytes <= LIMITS.memory_mib * MIB
    assert not any(result.files.values())


@pytest.fixture(autouse=True)
def _nothing_outlives(sandbox: Sandbox) -> Iterator[None]:
    yield
    left = programs_of(sandbox)
    deadline = time.monotonic() + 20
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = programs_of(sandbox)
    assert not left


def programs_of(sandbox: Sandbox) -> list[psutil.Process]:
    """Return the processes below the wardens: all boxes, which must be gone between requests."""
    wardens = list_wardens()
    assert len(wardens) >= sandbox.health()["idle"]
    below = [process for warden in wardens for process in warden.children(recursive=True)]
    if not sandbox.options.bubblewrap:
        return below
    outer = [process for process in below if _words(process)[:1] == _words(wardens[0])[:1]]
    within = {child for process in outer for child in process.children()}
    return [process for process in below if process not in within and process not in outer]


def list_wardens() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if "mcore_rl.services.sandbox.warden" in " ".join(_words(child))
    ]


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gets_nothing(sandbox: Sandbox, prelude: str, name: str) -> None:
    check(run(sandbox, prelude, Hostile(PROGRAMS[name])))
    honest = sandbox.run_code(CodeRequest("print(6 * 7)", limits=LIMITS))
    assert honest.ran is not None
    assert (honest.verdict, honest.ran.stdout) == (RunVerdict.OK, b"42\n")


@pytest.mark.parametrize("name", IN_THE_OPEN)
def test_outside_of_a_sandbox_the_same_program_gets_something(prelude: str, name: str) -> None:
    source = prelude + PROGRAMS[name].replace("{{", "{").replace("}}", "}")
    done = subprocess.run(
        [sys.executable, "-I", "-c", source], capture_output=True, text=True, timeout=240
    )
    assert "BAD" in done.stdout, done.stderr


@pytest.mark.parametrize("name", FILES_OUT)
def test_a_program_hands_nothing_out_that_is_not_its_own(
    sandbox: Sandbox, prelude: str, name: str
) -> None:
    check(run(sandbox, prelude, FILES_OUT[name]))


def test_a_file_that_is_too_large_is_not_handed_out(sandbox: Sandbox) -> None:
    source = "with open('out', 'wb') as file: file.truncate(12 << 20)"
    request = CodeRequest(source, fetch=("out",), limits=LIMITS, max_files_bytes=1 << 20)
    result = sandbox.run_code(request)
    assert (result.verdict, dict(result.files)) == (RunVerdict.OK, {})
    assert "more than 1048576 bytes" in result.message


def test_there_are_forty_and_more() -> None:
    assert len(PROGRAMS) + len(FILES_OUT) >= 40


def measure_host() -> int:
    """Return the bytes of this machine's memory that are in use."""
    memory = psutil.virtual_memory()
    return memory.total - memory.available


def measure_programs() -> int:
    """Return the bytes of the programs' own memory, and of all files that lie in memory."""
    held_bytes = psutil.virtual_memory().shared
    for warden in list_wardens():
        with contextlib.suppress(psutil.NoSuchProcess):
            held_bytes += sum(map(_measure_own, warden.children(recursive=True)))
    return held_bytes


def _measure_own(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        memory = process.memory_info()
        return memory.rss - memory.shared
    return 0


class Watch:
    """Samples how much more `measure` returns than at its start."""

    def __init__(self, measure: Callable[[], int]) -> None:
        self._measure = measure
        self._before = measure()
        self._is_over = threading.Event()
        self.most_bytes = 0
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._is_over.wait(0.05):
            self.most_bytes = max(self.most_bytes, self._measure() - self._before)

    def stop(self) -> int:
        self._is_over.set()
        self._thread.join()
        return self.most_bytes


@pytest.mark.parametrize("name", ["memory bomb", "memory in many processes", "memfd bomb"])
def test_memory_of_the_host_stays_within_the_limit(
    sandbox: Sandbox, prelude: str, name: str
) -> None:
    """Memory that other work takes meanwhile does not count, but for files in memory."""
    run(sandbox, prelude, Hostile("pass"))  # starts the worker, which is not what is measured
    watch = Watch(measure_programs)
    run(sandbox, prelude, Hostile(PROGRAMS[name]))
    has_cgroups = sandbox.options.use_cgroups
    processes = 1 if has_cgroups else LIMITS.processes
    # Pages that forks share count once for each, and other work has files in memory, too.
    most = (LIMITS.memory_mib * processes + LIMITS.files_mib + 256) * MIB
    assert watch.stop() < most


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_64_at_a_time_get_nothing(prelude: str, sandbox: Sandbox) -> None:
    use_cgroups = sandbox.options.use_cgroups
    has_outer = sandbox.options.bubblewrap
    crowd = Sandbox(SandboxOptions(CONCURRENCY, use_cgroups=use_cgroups, bubblewrap=has_outer))
    programs = {name: Hostile(source) for name, source in PROGRAMS.items()} | FILES_OUT
    held: dict[str, int] = {}
    try:
        for name in programs:
            watch = Watch(measure_host)
            with ThreadPoolExecutor(CONCURRENCY) as threads:
                work = [threads.submit(run, crowd, prelude, programs[name]) for _ in range(64)]
                results = [each.result() for each in work]
            for result in results:
                assert result.ran is not None, (name, result.message)
                assert b"BAD" not in result.ran.stdout, (name, result.ran.stdout[-300:])
                assert not any(result.files.values()), name
            most = CONCURRENCY * (LIMITS.memory_mib + LIMITS.files_mib) * MIB
            held[name] = watch.stop()
            if use_cgroups:
                assert held[name] < most + CONCURRENCY * SLACK_BYTES, name
            assert not programs_of(crowd), name
    finally:
        crowd.close()
    greediest = max(held, key=lambda name: held[name])
    print(f"the host lost at most {held[greediest] / MIB:.0f} MiB, to {greediest!r}")
