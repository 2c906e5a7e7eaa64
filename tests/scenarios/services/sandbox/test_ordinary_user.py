"""The sandbox for a user without any right: which layers hold, and a refusal where they cannot."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.ordinary_user import NOBODY, as_nobody, open_python
from tests.support.policy import ROOT

PROGRAMS = """
import json, os, sys
from mcore_rl.services.sandbox.execution import CodeRequest
from mcore_rl.services.sandbox.limits import Limits
from mcore_rl.services.sandbox.service import Sandbox, SandboxOptions
from tests.support.hostile_programs import PRELUDE, PROGRAMS

limits = Limits(wall_s=3.0, cpu_s=3, memory_mib=128, processes=16, files_mib=16, output_kib=64)
prelude = PRELUDE.format(port=1, abstract="none", path="/none", home="/root")
sandbox = Sandbox(SandboxOptions(workers=1, max_sessions=0, bubblewrap=sys.argv[1] == "outer"))
found = {}
try:
    sandbox.warm_up()
    del PROGRAMS["pip.conf"]  # expects another prefix than /usr, that of the system's Python
    for name, source in PROGRAMS.items():
        code = prelude + source.replace("{{", "{").replace("}}", "}")
        result = sandbox.run_code(CodeRequest(code, limits=limits))
        output = result.ran.stdout.decode(errors="replace") if result.ran else result.message
        found[name] = [result.verdict, output]
    has_cgroups = sandbox.has_cgroups()
finally:
    sandbox.close()
print(json.dumps({"uid": os.getuid(), "cgroups": has_cgroups, "found": found}))
"""
REFUSED = """
from mcore_rl.services.sandbox.limits import SandboxError
from mcore_rl.services.sandbox.service import run_program
try:
    run_program("print(1)")
except SandboxError as error:
    print(error)
"""


@pytest.fixture(autouse=True)
def _becomes_nobody() -> None:
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root can become another user; for others all tests are of this kind")
    if not open_python():
        pytest.skip("no Python 3.11 here that every user may start")
    if as_nobody(["test", "-r", str(ROOT / "mcore_rl" / "sandbox" / "warden.py")]).returncode:
        pytest.skip("other users may not read this repository")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layers", ["own", pytest.param("outer", marks=pytest.mark.slow)])
def test_hostile_programs_get_nothing_without_any_right(layers: str) -> None:
    if layers == "outer" and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed")
    done = as_nobody([open_python(), "-c", PROGRAMS, layers])
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["uid"], said["cgroups"]) == (NOBODY, False)
    assert len(said["found"]) > 40
    for name, (verdict, output) in said["found"].items():
        assert verdict != "sandbox_error", (name, output)
        assert "BAD" not in output, (name, output[-300:])


def test_where_user_namespaces_are_forbidden_no_program_runs() -> None:
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    inner = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh"]
    done = as_nobody([*inner, open_python(), "-c", REFUSED])
    assert "no sandbox for programs on this machine" in done.stdout, done.stderr
    assert "user.max_user_namespaces" in done.stdout


def test_a_folder_of_this_repository_is_what_was_tested() -> None:
    done = as_nobody([open_python(), "-c", "import mcore_rl; print(mcore_rl.__file__)"])
    assert Path(done.stdout.strip()) == ROOT / "mcore_rl" / "__init__.py"
