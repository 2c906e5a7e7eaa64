"""The package has a version, which is looked up only when it is asked for."""

import subprocess
import sys
from importlib import metadata

import pytest

import mcore_rl


def test_the_version_is_that_of_the_installed_package() -> None:
    assert mcore_rl.__version__ == metadata.version("mcore_rl")


def test_any_other_name_is_unknown() -> None:
    with pytest.raises(AttributeError, match="module 'mcore_rl' has no attribute 'versoin'"):
        getattr(mcore_rl, "versoin")  # noqa: B009


def test_an_import_looks_nothing_up() -> None:
    code = "import sys, mcore_rl; print('importlib.metadata' in sys.modules)"
    command = [sys.executable, "-S", "-c", code]
    folder = mcore_rl.__path__[0] + "/.."
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"
