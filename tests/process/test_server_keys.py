"""Keys of HTTP servers: random, hidden, handed to a child by a pipe or read from a private file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.process.server_keys import (
    ServerKeys,
    admin_headers,
    bearer,
    pass_to_child,
    read_key_file,
    user_headers,
)

CHILD = """
import sys
from pathlib import Path
from mcore_rl.process.server_keys import read_keys
fd = int(sys.argv[1])
keys = read_keys(fd)
print(keys.user, keys.admin, Path(f"/proc/self/fd/{fd}").exists())
"""


def test_each_run_has_keys_of_its_own_which_no_message_shows() -> None:
    keys = ServerKeys.make()
    assert keys != ServerKeys.make() and keys.user != keys.admin
    assert len(keys.user) >= 40 and len(keys.admin) >= 40
    assert keys.user not in repr(keys) and keys.admin not in f"{[keys]}"
    with pytest.raises(ValueError, match="admin key is empty"):
        ServerKeys("a", "")


@pytest.mark.parametrize(
    ("header", "user", "admin"),
    [
        ("Bearer user", True, False),
        ("bearer user", True, False),
        ("Bearer admin", True, True),
        ("Bearer use", False, False),
        ("Bearer user ", False, False),
        ("Basic user", False, False),
        ("user", False, False),
        ("Bearer \xff", False, False),
        ("", False, False),
    ],
)
def test_a_header_admits_by_the_whole_key(header: str, user: bool, admin: bool) -> None:
    keys = ServerKeys("user", "admin")
    assert (keys.admits_user(header), keys.admits_admin(header)) == (user, admin)
    without_user_key = ServerKeys("", "admin")
    assert without_user_key.admits_user(header)
    assert without_user_key.admits_admin(header) == admin


def test_clients_send_the_key_of_their_kind_of_call() -> None:
    keys = ServerKeys("user", "admin")
    assert user_headers(keys) == bearer("user") == {"Authorization": "Bearer user"}
    assert admin_headers(keys) == bearer("admin")
    assert user_headers(None) == admin_headers(None) == user_headers(ServerKeys("", "a")) == {}


def test_a_child_gets_the_keys_once_and_nothing_else_does() -> None:
    keys = ServerKeys.make()
    before = os.listdir("/proc/self/fd")
    with pass_to_child(keys) as fd:
        assert fd is not None
        child = subprocess.run(
            [sys.executable, "-c", CHILD, str(fd)],
            pass_fds=(fd,),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert child.stdout.split() == [keys.user, keys.admin, "False"], child.stderr
    assert os.listdir("/proc/self/fd") == before
    with pass_to_child(None) as fd:
        assert fd is None


def test_a_key_file_is_private_and_holds_one_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ValueError, match=r"--key-file=.*No such file"):
        read_key_file(path)
    path.write_text("0123456789abcdef\n")
    path.chmod(0o640)
    with pytest.raises(ValueError, match=r"others may read it \(mode 640\): chmod 600"):
        read_key_file(path)
    path.chmod(0o600)
    assert read_key_file(path) == "0123456789abcdef"
    for wrong in ("", "short", "0123456789abcdef 0123456789abcdef", "schlüssel" * 4):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="one key of at least 16 ASCII characters"):
            read_key_file(path)
