"""The system calls that Python lacks do what they say, in processes of their own."""

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.services.sandbox import isolation


def in_child(work: Callable[[], bool]) -> bool:
    """Return what `work` returns in a forked process."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 3)
        finally:
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_rights_are_gone_for_good() -> None:
    def work() -> bool:
        isolation.drop_bounding_rights()
        isolation.drop_rights()
        words = Path("/proc/self/status").read_text().split()
        found = dict(itertools.pairwise(words))
        names = ("CapPrm:", "CapEff:", "CapBnd:", "CapAmb:")
        return found["NoNewPrivs:"] == "1" and not any(int(found[name], 16) for name in names)

    if os.geteuid() != 0:
        pytest.skip("only root has rights to give up")
    assert in_child(work)


def test_a_clone_is_a_fork() -> None:
    child = isolation.clone(0)
    if child == 0:
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5


def test_a_clone_is_the_first_of_new_processes() -> None:
    def work() -> bool:
        isolation.unshare(isolation.NEW_USER)
        child = isolation.clone(isolation.NEW_PIDS)
        if child == 0:
            os._exit(0 if os.getpid() == 1 else 1)
        return os.waitpid(child, 0)[1] == 0

    assert in_child(work)


def test_the_keyring_is_new_or_refused() -> None:
    def work() -> bool:
        isolation.join_new_keyring()
        return True

    assert in_child(work)


@pytest.mark.parametrize(
    ("path", "number"),
    [("link", errno.ELOOP), ("../x", errno.EXDEV), ("/etc", errno.EXDEV), ("none", errno.ENOENT)],
)
def test_opening_beneath_a_folder_stays_there(path: str, number: int, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").write_text("text")
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with os.fdopen(isolation.open_beneath(folder, "file", os.O_RDONLY)) as file:
            assert file.read() == "text"
        with pytest.raises(OSError) as caught:
            isolation.open_beneath(folder, path, os.O_RDONLY)
        assert caught.value.errno == number
    finally:
        os.close(folder)


def test_a_refused_call_says_which() -> None:
    with pytest.raises(OSError, match="mount /none/such"):
        isolation.mount("none", "/none/such", "tmpfs")
