"""A notebook or a shell that keeps its state between calls, in a box of its own."""

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_rl.process.errors import make_encodable
from mcore_rl.services.sandbox.box import ProgramBox, Streams
from mcore_rl.services.sandbox.execution import check_path
from mcore_rl.services.sandbox.limits import MIB, BoxStep, Limits, RunRecord, SandboxError
from mcore_rl.services.sandbox.messages import wait_readable
from mcore_rl.services.sandbox.worker import Worker

KINDS = ("python", "bash")
NOTEBOOK = str(Path(__file__).with_name("notebook.py"))
"""Programs of sessions read this file, so it must be among the paths of their worker."""
INTERRUPT_S = 2.0
"""Time for a call to end after an interrupt at its deadline; then the session ends."""
_SHELL = """
exec 5<&3 6>&4 3<&- 4>&-
trap : INT
while IFS= read -r -d '' -u 5 line; do
  eval "$line" 5<&- 6>&- </dev/null
  printf '{"status": %d}\\0' $? >&6
done
"""


@dataclass(frozen=True)
class CallResult:
    """The output of one call in a session, and how it ended.

    status    exit status of a shell's last command; for a notebook 1 after an error
    error     name of the notebook's exception, or the limit that ended the call
    is_alive  whether the session takes further calls
    """

    stdout: bytes
    stderr: bytes
    status: int
    error: str = ""
    is_alive: bool = True
    wall_s: float = 0.0


class BoxSession:
    """A box with a running notebook ("python") or shell ("bash"). Its calls run one at a time.

    limits   of the whole session; wall_s is its longest life, output_kib holds for each call
    """

    def __init__(
        self, worker: Worker, kind: str, limits: Limits, files: Mapping[str, bytes] | None = None
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}: a session is one of {', '.join(KINDS)}")
        for path in files or {}:
            check_path(path)
        self.kind = kind
        self.last_used = time.monotonic()
        self.record: RunRecord | None = None
        self._lock = threading.Lock()
        self._worker = worker
        self._box = ProgramBox(worker, limits)
        if files:
            self._box.put(files)
        self._streams = Streams(limits.output_kib << 10)
        cells, self._cells = os.pipe()
        self._answers, answers = os.pipe()
        command = ("/bin/bash", "--norc", "-c", _SHELL) if kind == "bash" else ()
        self._step = BoxStep(command, "" if command else NOTEBOOK, limits=limits)
        try:
            self._box.start(self._step, self._streams, further=(cells, answers))
        finally:
            os.close(cells)
            os.close(answers)

    @property
    def is_busy(self) -> bool:
        """Whether a call runs."""
        return self._lock.locked()

    def call(self, source: str, timeout_s: float) -> CallResult:
        """Run a cell or a command line; at the deadline interrupt it, and then end the session.

        Raises ValueError if the source holds a zero byte, SandboxError if the session has ended.
        """
        text = make_encodable(source).encode()
        if b"\0" in text:
            raise ValueError("the source of a call holds a zero byte: leave it out")
        with self._lock:
            self.last_used = time.monotonic()
            self._box_of_living()
            try:
                return self._call(text + b"\0", timeout_s)
            finally:
                self.last_used = time.monotonic()

    def put(self, files: Mapping[str, bytes]) -> None:
        """Write files; FilesRefusedError if they do not fit."""
        for path in files:
            check_path(path)
        with self._lock:
            self._box_of_living().put(files)

    def get(
        self, paths: Sequence[str] | None = None, max_bytes: int = 64 * MIB
    ) -> dict[str, bytes]:
        """Return files, or with None all of them: a snapshot to begin another session with."""
        for path in paths or ():
            check_path(path)
        with self._lock:
            return self._box_of_living().get(paths, max_bytes)

    def close(self) -> None:
        """End all processes of the session, and forget its files."""
        with self._lock:
            for fd in (self._cells, self._answers):
                os.close(fd)
            self._streams.close()
            self._box.close()

    def _box_of_living(self) -> ProgramBox:
        if self.record is not None:
            raise SandboxError(f"the session has ended ({self.record.killed or 'exit'})")
        return self._box

    def _call(self, text: bytes, timeout_s: float) -> CallResult:
        began_s = time.monotonic()
        self._streams.take()
        os.set_blocking(self._cells, False)
        answer = bytearray()
        error = ""
        deadline = began_s + timeout_s
        while True:
            text = self._write(text)
            fds = [*self._streams.open_fds, self._answers, self._box.fileno()]
            ready = wait_readable(fds, min(deadline, time.monotonic() + 0.05) if text else deadline)
            self._streams.read(fd for fd in ready if fd in self._streams.texts)
            if self._box.fileno() in ready:
                return self._end(self._box.hear(), error, began_s)
            if self._answers in ready:
                answer += os.read(self._answers, 4096)
                if answer.endswith(b"\0"):
                    self._streams.read(self._streams.open_fds)
                    return self._result(bytes(answer[:-1]), error, began_s)
            if self._streams.is_over:
                return self._kill(
                    f"more than {self._streams.max_bytes >> 10} KiB of output", began_s
                )
            if time.monotonic() >= deadline:
                if error:
                    return self._kill(error, began_s)
                error = f"no end within {timeout_s:g} s"
                deadline += INTERRUPT_S
                self._box.tell({"op": "interrupt"})

    def _write(self, text: bytes) -> bytes:
        """Write what the pipe takes of `text`; return the rest."""
        try:
            return text[os.write(self._cells, text) :] if text else text
        except (BlockingIOError, BrokenPipeError):
            return text

    def _result(self, answer: bytes, error: str, began_s: float) -> CallResult:
        try:
            found = json.loads(answer)
            status = int(found.get("status", bool(found.get("error"))))
            error = error or str(found.get("error", ""))
        except (ValueError, AttributeError):  # a program wrote to the descriptor itself
            status, error = 1, "an answer that is none"
        stdout, stderr = self._streams.take()
        return CallResult(stdout, stderr, status, error, True, time.monotonic() - began_s)

    def _kill(self, error: str, began_s: float) -> CallResult:
        self._box.tell({"op": "kill"})
        if not wait_readable([self._box.fileno()], time.monotonic() + INTERRUPT_S * 5):
            self._worker.retire()
            raise SandboxError("the box of a session did not end its processes")
        return self._end(self._box.hear(), error, began_s)

    def _end(self, used: dict[str, object], error: str, began_s: float) -> CallResult:
        self._streams.read(self._streams.open_fds)
        record = self._box.record(self._step, used, self._streams, error)
        self.record = replace(record, stdout=b"", stderr=b"")
        error = record.killed or f"the session ended with status {record.status}"
        wall_s = time.monotonic() - began_s
        return CallResult(record.stdout, record.stderr, record.status, error, False, wall_s)
