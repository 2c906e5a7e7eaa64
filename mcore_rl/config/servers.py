"""Options of the servers that a run starts on each node with engines: a sandbox, and a search."""

from dataclasses import dataclass
from typing import Literal

from mcore_rl.config.bounds import Options, bounded


@dataclass
class SandboxConfig(Options, group="sandbox"):
    """A server that runs untrusted programs for rewards, environments and tools
    (docs/sandbox.md)."""

    workers: int = bounded(0, ge=0)
    """Programs that run at a time on each node with engines; 0: the run starts no sandbox."""
    max_waiting: int = bounded(1024, ge=0)
    """Requests of a node that wait for a worker; further ones are told to come again."""
    wall_s: float = bounded(10.0, gt=0)
    """Seconds of a program that asks for no other."""
    memory_mib: int = bounded(512, ge=1)
    """Memory of a program that asks for no other."""
    max_memory_mib: int = bounded(8192, ge=1)
    """The most memory that a program may ask for."""
    processes: int = bounded(32, ge=1)
    """Processes and threads of a program."""
    files_mib: int = bounded(64, ge=1)
    """Files of a program, in memory."""
    output_kib: int = bounded(1024, ge=1)
    """Standard output and errors of a program together."""
    max_sessions: int = bounded(16, ge=0)
    """Notebooks and shells that are open at a time on a node, each with a worker of its own."""
    idle_s: float = bounded(600.0, gt=0)
    """Seconds without a call after which a session ends."""
    session_s: float = bounded(3600.0, gt=0)
    """The longest life of a session."""
    cgroups: bool = True
    """Bound the processes of a program together, where cgroups can be written."""
    bubblewrap: bool = False
    """Run programs in bubblewrap as well, which must be installed on each node (bwrap)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_memory_mib < self.memory_mib:
            raise ValueError(
                f"sandbox.max_memory_mib={self.max_memory_mib} is less than sandbox.memory_mib="
                f"{self.memory_mib}, which a program gets that asks for nothing: raise the former"
            )

    @property
    def is_used(self) -> bool:
        return self.workers > 0


@dataclass
class SearchConfig(Options, group="search"):
    """A server that searches an index for environments and tools (docs/search.md)."""

    index: str = ""
    """Folder that `mcore-rl search build` made, seen from each node with engines; empty: the run
    starts no search server."""
    method: Literal["bm25", "dense", "hybrid"] = "bm25"
    """dense and hybrid need an index that was built with --encoder."""
    threads: int = bounded(4, ge=1)
    """Requests that each node works on at a time."""
    queue_len: int = bounded(1024, ge=1)
    """Requests of a node that wait or are worked on; further ones are told to come again."""
    deadline_s: float = bounded(60.0, gt=0)
    """For one request, its wait included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.queue_len < self.threads:
            raise ValueError(
                f"search.queue_len={self.queue_len} is less than search.threads={self.threads}:"
                " raise the former"
            )

    @property
    def is_used(self) -> bool:
        return bool(self.index)
