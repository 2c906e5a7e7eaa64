"""Carried wheels are importable inside, and leave the environment as it was."""

import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

from mcore_rl.doctor.wheels import wheels_installed

NAME = "carried_by_the_doctors_test"


def write_wheel(folder: Path) -> None:
    info = f"{NAME}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{NAME}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{NAME}.py", "ANSWER = 42\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_packages_of_a_folder_of_wheels_can_be_imported(tmp_path: Path) -> None:
    write_wheel(tmp_path)
    before = list(sys.path)
    with wheels_installed(tmp_path):
        assert import_module(NAME).ANSWER == 42
    assert sys.path == before
    del sys.modules[NAME]
    with pytest.raises(ModuleNotFoundError):
        import_module(NAME)


def test_no_folder_changes_nothing() -> None:
    before = list(sys.path)
    with wheels_installed(None):
        assert sys.path == before


def test_a_folder_without_wheels_and_a_broken_wheel_are_refused(tmp_path: Path) -> None:
    no_wheel = pytest.raises(ValueError, match=f"--wheels={tmp_path}: there is no .whl file")
    with no_wheel, wheels_installed(tmp_path):
        pass
    (tmp_path / "broken-1.0-py3-none-any.whl").write_text("no zip")
    broken = pytest.raises(ValueError, match=f"--wheels={tmp_path}: pip says ")
    with broken, wheels_installed(tmp_path):
        pass
