"""The package has one version, everywhere, and its import loads nothing."""

import re
import subprocess
import sys
import tomllib

import pytest

import mcore_rl
from tests.support.policy import ROOT, read


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
    chart = read(ROOT / "launch/helm/mcore-rl/Chart.yaml")
    changes = read(ROOT / "CHANGELOG.md")
    assert project["version"] == mcore_rl.__version__
    assert set(re.findall(r"(?im)^(?:app)?version: (\S+)", chart)) == {mcore_rl.__version__}
    assert re.findall(r"(?m)^## (\d\S+)", changes)[0] == mcore_rl.__version__


def test_any_other_name_is_unknown() -> None:
    with pytest.raises(AttributeError, match="module 'mcore_rl' has no attribute 'versoin'"):
        getattr(mcore_rl, "versoin")  # noqa: B009


def test_an_import_loads_nothing_else() -> None:
    code = "import sys, mcore_rl; print(*(name for name in sys.modules if '_' not in name[0]))"
    command = [sys.executable, "-S", "-c", code]
    folder = mcore_rl.__path__[0] + "/.."
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    bare = subprocess.run(
        [sys.executable, "-S", "-c", code.replace(", mcore_rl", "")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(ended.stdout.split()) - set(bare.stdout.split()) <= {"mcore_rl"}
