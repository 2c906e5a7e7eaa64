"""Whoever asks for a fork learns that there is none, however the other process fails."""

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.process import fork_request
from mcore_rl.process.fork_request import FORKED, GO, PID_BYTES, READY, fork_child, fork_detached

PID = (4321).to_bytes(PID_BYTES, "little")


def listen(folder: Path, answer: Callable[[socket.socket], None]) -> threading.Thread:
    """Take one request and do `answer` with the connection, in a thread."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / "socket"))
    listener.listen()

    def take() -> None:
        with listener:
            connection, _ = listener.accept()
        with connection:
            num_bytes = int.from_bytes(connection.recv(8), "little")
            connection.recv(num_bytes, socket.MSG_WAITALL)
            answer(connection)

    thread = threading.Thread(target=take)
    thread.start()
    return thread


def answering(after_go: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.sendall(READY)
        assert connection.recv(1) == GO
        connection.sendall(after_go)

    return answer


@pytest.mark.parametrize(
    ("sent", "pid"), [(FORKED + PID, 4321), (FORKED + PID[:2], None), (b"", None)]
)
def test_a_fork_is_one_whose_number_arrived(tmp_path: Path, sent: bytes, pid: int | None) -> None:
    thread = listen(tmp_path, answering(sent))
    fork = fork_child(str(tmp_path / "socket"), ["script"], {}, [0, 1, 2])
    thread.join()
    assert (None if fork is None else fork.pid) == pid
    if fork is not None:
        assert fork.wait() == -9  # whoever forked is gone


def test_there_is_none_without_the_other_process_or_if_it_refuses(tmp_path: Path) -> None:
    assert fork_child(str(tmp_path / "socket"), ["script"], {}, [0, 1, 2]) is None
    thread = listen(tmp_path, lambda connection: None)
    assert not fork_detached(str(tmp_path / "socket"), ["script"])
    thread.join()


def test_one_that_answers_too_late_forks_only_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_request, "IMPORTS_S", 0.2)
    hung_up: list[bytes] = []

    def wait(connection: socket.socket) -> None:
        connection.sendall(READY)
        assert connection.recv(1) == GO
        hung_up.append(connection.recv(1))

    for kind in ("child", "detached"):
        folder = tmp_path / kind
        folder.mkdir()
        thread = listen(folder, wait)
        path = str(folder / "socket")
        if kind == "child":
            assert fork_child(path, ["script"], dict(os.environ), [0, 1, 2]) is None
        else:
            assert fork_detached(path, ["script"])
        thread.join()
    assert hung_up == [b"", b""]
