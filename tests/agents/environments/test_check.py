"""An environment that cannot work is refused in seconds, with a remedy."""

import sys
import time
import venv

import pytest

from mcore_rl.agents.environments.check import check
from mcore_rl.agents.environments.options import EnvironmentOptions
from tests.agents.environments import episodes


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=False)
    return str(folder / "bin/python")


def refusal(kind, options=None, python=""):
    began_s = time.monotonic()
    with pytest.raises(ValueError) as caught:
        check(EnvironmentOptions(kind, options or {}, python=python))
    assert time.monotonic() - began_s < 5.0
    return str(caught.value)


def test_a_good_environment_passes():
    check(EnvironmentOptions(f"{episodes.HERE}:Countdown", {"turns": 4}))


def test_a_missing_package_is_named_with_the_command_that_installs_it(bare_python):
    text = refusal("gymnasium", {"id": "CartPole-v1"}, bare_python)
    assert text == (
        f"environment 'gymnasium' under {bare_python}: it has no gymnasium: "
        f"{bare_python} -m pip install gymnasium, or name another interpreter as python"
    )


def test_unknown_kinds_and_options_need_no_interpreter():
    assert "no environment of kind 'gym'" in refusal("gym", python="/no/python")
    assert "does not read the options x" in refusal("gymnasium", {"id": "a", "x": 1}, "/no/python")


def test_an_interpreter_that_cannot_be_used_is_named(tmp_path):
    kind = f"{episodes.HERE}:Countdown"
    assert "it cannot be started" in refusal(kind, python="/no/python")
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho broken >&2\nexit 4\n")
    other.chmod(0o755)
    assert "the check ended with status 4: broken" in refusal(kind, python=str(other))


def test_errors_of_a_users_file_are_shown(tmp_path):
    file = tmp_path / "game.py"
    file.write_text("print('hello')\nimport no_such_package_of_a_game\n")
    text = refusal(f"{file}:Game")
    assert f"under {sys.executable}: ModuleNotFoundError: No module named 'no_such_pack" in text
    assert "does not read the options turn:" in refusal(f"{episodes.HERE}:Countdown", {"turn": 1})
