"""Runs inside a sandbox: starts a process for each test of a program and reports how it ended.

    frames on standard input --> driver --fork, own pipes--> program with one test
    a line of JSON per test  <-- driver <--output, result--

The driver reads a test only when it starts it, and never knows what is expected. So a program
cannot find the tests to come or their answers: not in a file, and not in its memory.
Arguments and results travel as JSON (`pack`, `unpack`). The text of this file is the program that
runs in the sandbox, so it imports nothing of this package.
"""

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import sys
import threading
import time
import types
from typing import Any, NoReturn

_HEADER_LEN = 8
ERROR_LEN = 2000
"""The last characters of its standard error that are kept of a program."""
READY = "ready"
"""The first line of the report. Without it no program has begun."""


_KINDS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def pack(value: Any) -> Any:
    """Return a value that JSON can hold. Raises TypeError for an object that is not plain."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return ["dict", [[pack(key), pack(entry)] for key, entry in value.items()]]
    for name, kind in _KINDS.items():
        if isinstance(value, kind):
            return [name, [pack(entry) for entry in value]]
    raise TypeError(f"{type(value).__name__} is no plain value")


def unpack(packed: Any) -> Any:
    """Return the value that was packed.

    Raises ValueError or TypeError for anything that `pack` does not return.
    """
    if packed is None or isinstance(packed, bool | int | float | str):
        return packed
    if not isinstance(packed, list) or len(packed) != 2 or not isinstance(packed[1], list):
        raise ValueError(f"{packed!r:.100} was not packed")
    kind, entries = packed
    if kind == "dict":
        return {unpack(key): unpack(entry) for key, entry in entries}
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"{kind!r:.100} is no kind of value")
    return _KINDS[kind](unpack(entry) for entry in entries)


def read_frame() -> Any:
    """Return the next frame of standard input: its length in 8 hexadecimal digits, then JSON."""
    header = _read(_HEADER_LEN)
    return json.loads(_read(int(header, 16))) if header else None


def _read(num_bytes: int) -> bytes:
    chunks = b""
    while len(chunks) < num_bytes and (chunk := os.read(0, num_bytes - len(chunks))):
        chunks += chunk
    return chunks


def serve() -> tuple[str, Any, int]:
    """Start a process per frame; return only there, with (program, test, where results go)."""
    setup = read_frame()
    for name in setup.get("executables", ()):
        with contextlib.suppress(PermissionError):  # whoever wrote it has made it executable
            os.chmod(name, 0o755)
    gc.freeze()  # a collection in a program would copy the memory that it shares with the driver
    _say(READY)
    while (test := read_frame()) is not None:
        try:
            given = _input_of(test)
        except OSError as error:
            _say(json.dumps({"refused": f"no file for standard input: {error}"}))
            os._exit(1)
        pipes = [os.pipe() for _ in range(3)]
        pid = os.fork()
        if pid == 0:
            return setup["programs"][test["program"]], test, _enter(given, pipes)
        os.close(given)
        for _, writer in pipes:
            os.close(writer)
        readers = [reader for reader, _ in pipes]
        _say(json.dumps(_follow(pid, readers, setup["test_s"], setup["cap_bytes"])))
        for reader in readers:
            os.close(reader)
    os._exit(0)


def _say(line: str) -> None:
    data = line.encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


def _input_of(test: Any) -> int:
    """Return a file without a name that holds the test's standard input."""
    given = os.open(os.environ.get("TMPDIR", "/tmp"), os.O_TMPFILE | os.O_RDWR, 0o600)
    text = test.get("stdin", "").encode()
    while text:
        text = text[os.write(given, text) :]
    os.lseek(given, 0, os.SEEK_SET)
    return given


def _enter(given: int, pipes: list[tuple[int, int]]) -> int:
    """Give this process its input and output; return the descriptor for its result."""
    os.setsid()
    os.dup2(given, 0)
    os.close(given)
    (_, out), (_, error), (_, result) = pipes
    os.dup2(out, 1)
    os.dup2(error, 2)
    for reader, writer in pipes:
        os.close(reader)
        if writer != result:
            os.close(writer)
    return result


def _follow(pid: int, readers: list[int], test_s: float, cap_bytes: int) -> dict[str, Any]:
    """Collect what a process writes until it ends, or end it at a limit."""
    texts = {reader: bytearray() for reader in readers}
    deadline = time.monotonic() + test_s
    ended = os.pidfd_open(pid)
    watched = [*readers, ended]
    killed = ""
    while ended in watched and not killed:
        left_s = deadline - time.monotonic()
        ready = select.select(watched, [], [], max(left_s, 0.0))[0]
        if left_s <= 0:
            killed = f"no end within {test_s:g} s"
        for descriptor in ready:
            if descriptor == ended or not _collect(descriptor, texts[descriptor]):
                watched.remove(descriptor)
        if sum(map(len, texts.values())) > cap_bytes:
            killed = f"more than {cap_bytes} bytes of output"
    _kill(pid)
    for reader in readers:  # a process that it left behind may still hold the other end
        os.set_blocking(reader, False)
        while reader in watched and len(texts[reader]) <= cap_bytes:
            if not _collect(reader, texts[reader]):
                break
    os.close(ended)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    out, error, result = (bytes(text).decode(errors="replace") for text in texts.values())
    status = code if code >= 0 else 128 - code
    error = error[-ERROR_LEN:]
    return {"status": status, "out": out, "error": error, "killed": killed, "result": result}


def _collect(reader: int, text: bytearray) -> bool:
    """Read what is there; return whether more may come."""
    try:
        chunk = os.read(reader, 1 << 16)
    except BlockingIOError:
        return False
    text += chunk
    return bool(chunk)


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def run(program: str, test: Any, result_fd: int) -> None:
    """Run the program in this process: as a script, or by a call whose result is written.

    A compiled program takes the place of this process.
    """
    if "command" in test:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would keep that
        os.execv(f"./{test['command']}", [test["command"]])
    function = test.get("function")
    module = types.ModuleType("__main__" if function is None else "program")
    sys.modules[module.__name__] = module
    sys.argv = ["program.py"]
    sys.excepthook = _show_error
    exec(compile(program, "<program>", "exec"), module.__dict__)
    if function is None:
        _end()
    names = module.__dict__
    owner: Any = names.get("Solution")
    found = getattr(owner(), function) if hasattr(owner, function) else names[function]
    result = json.dumps(pack(found(*unpack(test["arguments"]))))
    data = result.encode()
    while data:
        data = data[os.write(result_fd, data) :]
    os._exit(0)


def _show_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Show an error without the driver's own two frames."""
    shown = trace.tb_next.tb_next
    # From Python 3.13 on, the traceback of the error itself is shown.
    sys.__excepthook__(kind, error.with_traceback(shown), shown)


def _end() -> NoReturn:
    """End a script that came to its end.

    The interpreter's own end would touch, and so copy, all memory that is shared with the driver.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    run(*serve())
