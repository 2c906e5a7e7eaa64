"""Limits of a program, and the record of what it used and how it ended."""

import enum
from dataclasses import asdict, dataclass, field
from typing import Any

MIB = 1 << 20


class SandboxError(RuntimeError):
    """The sandbox could not run a program; the message says why. It says nothing of the program."""


class SandboxFullError(SandboxError):
    """All workers are busy and the queue has no place left; the same request may succeed later."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    wall_s      seconds until it is killed
    cpu_s       seconds of processor time, for each of its processes
    memory_mib  all its processes and files together where cgroups can be written; elsewhere each
                process
    processes   processes and threads at a time
    files_mib   bytes of its files
    num_files   files and folders
    output_kib  standard output and errors together
    open_files  open files of each process
    cpus        processors at a time, where cgroups can be written
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_mib: int = 512
    processes: int = 8
    files_mib: int = 16
    output_kib: int = 256
    num_files: int = 4096
    open_files: int = 64
    cpus: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name}={value}: a limit of a sandbox must be greater than 0")


class RunVerdict(enum.StrEnum):
    """How an execution ended; `sandbox_error` says nothing about the program."""

    OK = "ok"
    WRONG = "wrong"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    KILLED = "killed"
    SANDBOX_ERROR = "sandbox_error"


@dataclass(frozen=True)
class BoxStep:
    """One command, or one Python program, in a box.

    command          what to execute; empty: `program` runs in a Python that is already started
    program          path of a Python program
    environment      further variables, as (name, value)
    reserves_memory  the command reserves far more addresses than it uses, as Java, Node and Go do
    """

    command: tuple[str, ...] = ()
    program: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    limits: Limits = field(default_factory=Limits)
    reserves_memory: bool = False


@dataclass(frozen=True)
class RunRecord:
    """One execution: how it ended, what it used, and its limits.

    status        exit status, or 128 + signal
    killed        the limit that ended it, or empty
    wall_s cpu_s  seconds; cpu_s of all its processes
    memory_bytes  the most that it held: all its processes with cgroups, else the largest process
    """

    verdict: RunVerdict
    status: int
    stdout: bytes
    stderr: bytes
    killed: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    memory_bytes: int = 0
    limits: Limits = field(default_factory=Limits)

    def account(self) -> dict[str, Any]:
        """Return the record without the output, for JSON."""
        fields = asdict(self)
        del fields["stdout"], fields["stderr"]
        return fields
