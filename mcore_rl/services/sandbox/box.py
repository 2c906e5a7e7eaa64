"""The caller's side of a box: files in and out, steps, and what they print, read up to a limit."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from mcore_rl.services.sandbox.box_files import read_bundle, write_bundle
from mcore_rl.services.sandbox.limits import (
    MIB,
    BoxStep,
    Limits,
    RunRecord,
    RunVerdict,
    SandboxError,
)
from mcore_rl.services.sandbox.messages import Message, memory_file, receive, send, wait_readable
from mcore_rl.services.sandbox.worker import Worker

FILES_S = 60.0
"""Time for a box to write or read its files, which are in memory."""
GRACE_S = 10.0
"""Time between the deadline that a box keeps itself, and the one that its caller enforces."""
_PIPE_BYTES = 1 << 16
_CPU_ENDED = 128 + signal.SIGXCPU


class FilesRefusedError(ValueError):
    """Files do not fit into the box, or are more than the caller wanted back."""


@dataclass
class Streams:
    """The ends of a step's pipes from which its output is read, and what was read so far."""

    max_bytes: int
    texts: dict[int, bytearray] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)

    def open(self) -> int:
        """Add a stream; return the end to write to."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self.texts[reader] = bytearray()
        return writer

    @property
    def open_fds(self) -> list[int]:
        return [fd for fd in self.texts if fd not in self.closed]

    @property
    def is_over(self) -> bool:
        return sum(map(len, self.texts.values())) > self.max_bytes

    def read(self, fds: Iterable[int]) -> None:
        """Read what is there, from each of `fds` at most until the limit is passed."""
        for fd in fds:
            while not self.is_over:
                try:
                    chunk = os.read(fd, _PIPE_BYTES)
                except BlockingIOError:
                    break
                if not chunk:
                    self.closed.add(fd)
                    break
                self.texts[fd] += chunk

    def take(self) -> list[bytes]:
        """Return the text of each stream up to the limit, and begin anew."""
        found = [bytes(text[: self.max_bytes]) for text in self.texts.values()]
        for text in self.texts.values():
            text.clear()
        return found

    def close(self) -> None:
        for fd in self.texts:
            os.close(fd)
        self.texts.clear()


class ProgramBox:
    """A folder in memory and the processes that work in it, gone when it closes.

    Steps run one after another. Files go in and out before, during and after a step.
    Not for several threads at once.
    """

    def __init__(self, worker: Worker, limits: Limits) -> None:
        self._worker = worker
        self._kills_before = 0 if worker.cgroup is None else worker.cgroup.num_memory_kills()
        self._call: socket.socket = worker.begin_box(limits)

    def __enter__(self) -> "ProgramBox":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the box; SandboxError if that fails, and the worker is lost."""
        self._call.close()
        if not self._worker.is_retired:
            self._worker.wait_closed()

    def limit(self, limits: Limits) -> None:
        """Change the limits that hold for all processes of the box together."""
        self._worker.limit(limits)

    def put(self, files: Mapping[str, bytes]) -> None:
        """Write files, by their paths below the box; FilesRefusedError if they do not fit."""
        with memory_file() as stream:
            write_bundle(files, stream)
            stream.seek(0)
            self._ask({"op": "put"}, [stream.fileno()])

    def get(self, paths: Sequence[str] | None, max_bytes: int = 64 * MIB) -> dict[str, bytes]:
        """Return the regular files at `paths`, or all; links and absent ones are left out.

        Raises FilesRefusedError if they have more than `max_bytes` together.
        """
        with memory_file() as stream:
            message = {"op": "get", "paths": paths, "max_bytes": max_bytes}
            self._ask(message, [stream.fileno()])
            stream.seek(0)
            return read_bundle(stream)

    def run(self, step: BoxStep, stdin: bytes = b"") -> RunRecord:
        """Run a step to its end, or kill it at a limit.

        Raises SandboxError if the sandbox failed, which says nothing about the program.
        """
        streams = Streams(step.limits.output_kib << 10)
        try:
            self.start(step, streams, stdin)
            return self._follow(step, streams)
        finally:
            streams.close()

    def start(
        self, step: BoxStep, streams: Streams, stdin: bytes = b"", further: Sequence[int] = ()
    ) -> None:
        """Start a step that prints to `streams`; it has `further` as descriptors 3, 4, ..."""
        outputs = [streams.open(), streams.open()]
        with memory_file(stdin, is_sealed=True) as text:
            try:
                self.tell(_message(step), [text.fileno(), *outputs, *further])
            finally:
                for fd in outputs:
                    os.close(fd)

    def _follow(self, step: BoxStep, streams: Streams) -> RunRecord:
        wall_s = step.limits.wall_s
        began_s = time.monotonic()
        deadline = began_s + wall_s + GRACE_S
        killed = ""
        while True:
            ready = wait_readable([*streams.open_fds, self.fileno()], deadline)
            if not ready:
                self._worker.retire()
                used = {"status": 137, "is_late": True, "wall_s": time.monotonic() - began_s}
                return self.record(step, used, streams, "")
            streams.read(fd for fd in ready if fd != self.fileno())
            if streams.is_over and not killed:
                killed = f"more than {step.limits.output_kib} KiB of output"
                streams.closed.update(streams.texts)
                self.tell({"op": "kill"})
            if self.fileno() in ready:
                streams.read(streams.open_fds)
                return self.record(step, self.hear(), streams, killed)

    def record(self, step: BoxStep, used: Message, streams: Streams, killed: str) -> RunRecord:
        """Return the record of a step that ended as `used` says, with its output."""
        if streams.is_over and not killed:
            killed = f"more than {step.limits.output_kib} KiB of output"
        stdout, stderr = streams.take()
        peak_bytes = used.get("memory_bytes", 0)
        status = used["status"]
        verdict = RunVerdict.WRONG if status else RunVerdict.OK
        if killed:
            verdict = RunVerdict.KILLED
        cgroup = self._worker.cgroup
        if cgroup is not None:
            peak_bytes = cgroup.peak_bytes() or peak_bytes
            if cgroup.num_memory_kills() > self._kills_before:
                verdict = RunVerdict.MEMORY
                killed = f"more than {step.limits.memory_mib} MiB of memory"
        cpu_s = used.get("cpu_s", 0.0)
        if used["is_late"]:
            verdict = RunVerdict.TIMEOUT
            killed = f"no end within {step.limits.wall_s:g} s"
        elif verdict == RunVerdict.WRONG and (
            status == _CPU_ENDED or (status == 137 and cpu_s >= step.limits.cpu_s)
        ):
            verdict = RunVerdict.TIMEOUT
        return RunRecord(
            verdict, status, stdout, stderr, killed, used["wall_s"], cpu_s, peak_bytes, step.limits
        )

    def fileno(self) -> int:
        """Return the descriptor that is readable once the step has ended."""
        return self._call.fileno()

    def tell(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message to the box; SandboxError if it has ended."""
        try:
            send(self._call, message, fds)
        except OSError as error:
            self._worker.retire()
            reason = self._last_words() or str(error)
            raise SandboxError(
                f"the box ended before it was told {message['op']}: {reason}"
            ) from None

    def hear(self) -> Message:
        """Return the next answer; SandboxError if the box has ended or could not run a step."""
        received = receive(self._call)
        if received is None:
            self._worker.retire()
            raise SandboxError("the box ended without an answer, perhaps for lack of memory")
        answer = received[0]
        if answer.get("error"):
            raise SandboxError(f"the sandbox could not run a program: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            received = receive(self._call)
            return received[0].get("error", "") if received else ""
        return ""

    def _ask(self, message: Message, fds: Sequence[int]) -> None:
        self.tell(message, fds)
        if not wait_readable([self.fileno()], time.monotonic() + FILES_S):
            self._worker.retire()
            raise SandboxError(f"waited {FILES_S:g} s for the box to {message['op']} files")
        refused = self.hear()["refused"]
        if refused:
            raise FilesRefusedError(f"files of the box: {refused}")


def _message(step: BoxStep) -> Message:
    limits = step.limits
    memory = "RLIMIT_DATA" if step.reserves_memory else "RLIMIT_AS"
    return {
        "op": "run",
        "command": list(step.command),
        "program": step.program,
        "environment": dict(step.environment),
        "wall_s": limits.wall_s,
        "limits": {
            "RLIMIT_CPU": limits.cpu_s,
            memory: limits.memory_mib * MIB,
            "RLIMIT_NPROC": limits.processes,
            "RLIMIT_FSIZE": limits.files_mib * MIB,
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_MEMLOCK": 0,
        },
    }
