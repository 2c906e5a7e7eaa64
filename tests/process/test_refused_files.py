"""A file that this user may not use is told in one line, with the user and the remedy."""

import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.process.disk import check_readable, explain_refusal, is_refused
from tests.support.ordinary_user import NOBODY
from tests.support.policy import ROOT

USER = getpass.getuser()
READ = """
import os, sys
from pathlib import Path
from mcore_rl.process.disk import check_readable, explain_refusal
os.chdir(sys.argv[1])  # below a folder that others may not enter
if os.getuid() == 0:
    os.setgid(65534)
    os.setgroups([])
    os.setuid(65534)
try:
    check_readable(Path("closed"))
except OSError as error:
    print(explain_refusal(error))
"""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            PermissionError(13, "Permission denied", "/a/b"),
            f"/a/b: no permission for user {USER}; have its owner give it (chmod), or name another",
        ),
        (
            OSError(30, "Read-only file system", b"/a/\xff"),
            "/a/\udcff: its filesystem is read-only; name another folder to write to",
        ),
        (
            PermissionError(13, "Failed to open local file '/a'"),
            f"[Errno 13] Failed to open local file '/a': no permission for user {USER};",
        ),
        (FileNotFoundError(2, "No such file", "/a"), "[Errno 2] No such file: '/a'"),
        (ValueError("a wrong value"), "a wrong value"),
    ],
)
def test_the_line_has_file_user_and_remedy(error: ValueError | OSError, text: str) -> None:
    assert explain_refusal(error).startswith(text)
    assert isinstance(error, ValueError) or is_refused(error) == (error.errno in (1, 13, 30))


def test_a_file_that_is_there_but_closed_is_not_called_missing(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.write_text("mine")
    check_readable(closed)
    closed.chmod(0)
    tmp_path.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "USER": "", "LOGNAME": ""},
        capture_output=True,
        text=True,
    )
    user = "nobody" if os.getuid() == 0 else USER
    assert NOBODY == 65534 and done.stdout.startswith(f"closed: no permission for user {user};"), (
        done.stderr
    )
