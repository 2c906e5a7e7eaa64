"""Runs untrusted Python programs and returns their output.

They get no network, no foreign files and bounded resources. Each program runs in Linux namespaces
of its own (launcher.py); when it ends, the kernel ends every process in them. docs/rewards.md says
what that guarantees and what it does not.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

from mcore_rl.process.text import make_encodable

LAUNCHER = Path(__file__).with_name("launcher.py")
PROGRAM = "program.py"
_GRACE_S = 2.0
_SYSTEM_FOLDERS = ("/bin", "/lib", "/lib64", "/usr")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/box",
    "TMPDIR": "/box",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class SandboxError(RuntimeError):
    """This machine cannot isolate programs; the message says what failed and what to do."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    memory_mib bounds each process: all together can use `processes` times that, plus files_mib.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_mib: int = 512
    processes: int = 8
    files_mib: int = 16
    output_kib: int = 256


@dataclass(frozen=True)
class Outcome:
    """How a program ended. `killed` names the limit that ended it, or is empty.

    `status` is its exit status, or 128 + signal. Output beyond the limit is cut off.
    """

    status: int
    stdout: str
    stderr: str
    killed: str = ""


def run_program(source: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Run a Python program in a sandbox.

    Raises SandboxError if this machine allows none: a program never runs outside of one.
    """
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="sandbox_") as folder:
        stdin_file = Path(folder, "stdin")
        stdin_file.write_text(make_encodable(stdin), encoding="utf-8")
        root = Path(folder, "root")
        root.mkdir()
        reader, report_fd = os.pipe()
        with os.fdopen(reader, "rb") as report:
            process = _launch(_job(source, root, stdin_file, limits, report_fd), report_fd)
            outcome = _follow(process, limits)
            failed = report.read().decode(errors="replace")
    if failed:
        raise SandboxError(
            f"no sandbox for programs on this machine: {failed}. It needs Linux 5.14 or later with"
            " user namespaces for this user (sysctl user.max_user_namespaces and, on some systems,"
            " kernel.unprivileged_userns_clone or kernel.apparmor_restrict_unprivileged_userns; in"
            " a container also a seccomp profile that allows unshare and mount)"
        )
    return outcome


def _job(source: str, root: Path, stdin: Path, limits: Limits, report_fd: int) -> dict[str, object]:
    mib = 1 << 20
    return {
        "command": [sys.executable, "-I", "-B", f"/box/{PROGRAM}"],
        "environment": _ENVIRONMENT,
        "files": {PROGRAM: make_encodable(source)},
        "folders": _folders(),
        "root": str(root),
        "stdin": str(stdin),
        "tmp_bytes": limits.files_mib * mib,
        "report_fd": report_fd,
        "caller_pid": os.getpid(),
        "limits": {
            "RLIMIT_CPU": limits.cpu_s,
            "RLIMIT_AS": limits.memory_mib * mib,
            "RLIMIT_NPROC": limits.processes,
            "RLIMIT_FSIZE": limits.files_mib * mib,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        },
    }


@lru_cache
def _folders() -> list[str]:
    """Return the folders that Python needs, shortest first: system libraries, Python, packages."""
    wanted = {
        *_SYSTEM_FOLDERS,
        sys.prefix,
        sys.base_prefix,
        str(Path(sys.executable).resolve().parents[1]),
    }
    return sorted((folder for folder in wanted if os.path.isdir(folder)), key=len)


def _launch(job: dict[str, object], report_fd: int) -> subprocess.Popen[bytes]:
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(LAUNCHER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[report_fd],
            start_new_session=True,
            env=_ENVIRONMENT,
        )
    finally:
        os.close(report_fd)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(job).encode() + b"\n")
    return process


def _follow(process: subprocess.Popen[bytes], limits: Limits) -> Outcome:
    """Collect the output of `process` until it ends, or kill it at a limit."""
    assert process.stdout is not None and process.stderr is not None
    texts: dict[IO[bytes], bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    deadline = time.monotonic() + limits.wall_s
    killed = _read_until_closed(texts, deadline, limits)
    if not killed:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0) + _GRACE_S)
        except subprocess.TimeoutExpired:
            killed = f"no end within {limits.wall_s:g} s"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    status = process.wait(_GRACE_S)
    max_bytes = limits.output_kib << 10
    out, err = (bytes(text[:max_bytes]).decode(errors="replace") for text in texts.values())
    process.stdout.close()
    process.stderr.close()
    return Outcome(status, out, err, killed)


def _read_until_closed(texts: dict[IO[bytes], bytearray], deadline: float, limits: Limits) -> str:
    """Read each stream into its text until all are closed; return the limit that was hit, or ""."""
    with selectors.DefaultSelector() as selector:
        for stream in texts:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return f"no end within {limits.wall_s:g} s"
            for key, _ in selector.select(left_s):
                stream = key.fileobj
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(stream)
                texts[stream] += chunk  # type: ignore[index]
            if sum(map(len, texts.values())) > limits.output_kib << 10:
                return f"more than {limits.output_kib} KiB of output"
    return ""
