"""An environment that cannot work is refused in seconds, with a remedy."""

import sys
import time
import venv

import pytest

from mcore_rl.agents.environments.check import check
from mcore_rl.agents.environments.worker_process import EnvironmentOptions
from tests.agents.environments import episodes, toolbox
from tests.agents.environments.foreign import (
    PYTHON,
    needs_agents_venv,
    needs_verl,
    verl_variables,
)
from tests.support.policy import ROOT


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
        f"agents.environment=gymnasium under {bare_python}: it has no gymnasium: "
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
    assert f"at {file} line 2; install no_such_package_of_a_game for {sys.executable}" in text
    assert "does not read the options turn:" in refusal(f"{episodes.HERE}:Countdown", {"turn": 1})


@pytest.mark.parametrize("option", ["functions", "reward"])
def test_tools_and_their_reward_are_imported(tmp_path, option):
    file = tmp_path / "mine.py"
    file.write_text("def add(a: int) -> int:\n    'Add.'\n    return a\nimport no_such_package\n")
    good = f"{toolbox.__file__}:add"
    given = {"functions": [good], "reward": f"{file}:add"}
    if option == "functions":
        given = {"functions": [good, f"{file}:add"]}
    text = refusal("tools", given)
    assert f"ModuleNotFoundError: No module named 'no_such_package', at {file} line 4" in text


@needs_agents_venv()
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gymnasium", {"id": "CartPole-v9"}, "id is 'CartPole-v9': .*v1"),
        ("gymnasium", {"id": "nowhere:Game-v0"}, "No module named 'nowhere', at .*install nowhere"),
        pytest.param(
            *("verifiers", {"env": {"taskset": {"id": "no-such-taskset"}}}),
            "no-such-taskset.* not fou",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_packages_know_what_options_name(kind, options, message):
    with pytest.raises(ValueError, match=f"agents.environment={kind} under .*{message}"):
        check(EnvironmentOptions(kind, options, python=PYTHON))


@pytest.mark.slow
@needs_agents_venv()
def test_environments_of_packages_pass():
    check(EnvironmentOptions("gymnasium", {"id": "CartPole-v1"}, python=PYTHON))
    taskset = f"{ROOT}/recipes/tools/verifiers_sums.py:Sums"
    check(EnvironmentOptions("verifiers", {"env": {"taskset": {"id": taskset}}}, python=PYTHON))


def verl_check(kind, section, folder, entry):
    path = folder / "classes.yaml"
    path.write_text(f"{section}:\n- {entry}\n")
    check(EnvironmentOptions(kind, {"config": str(path)}, variables=verl_variables()))


@pytest.mark.slow
@needs_verl()
@pytest.mark.parametrize(
    ("kind", "section", "good"),
    [
        ("verl_tools", "tools", "verl_classes.Notes"),
        ("verl_interaction", "interaction", "verl_classes.Echo"),
    ],
)
def test_classes_of_verl_are_imported(tmp_path, kind, section, good):
    verl_check(kind, section, tmp_path, f"class_name: {good}")
    for name, message in (
        ("no_such_package.Tool", "class_name no_such_package.Tool: .* finds no module"),
        ("verl_classes.Nothing", "class_name verl_classes.Nothing: verl_classes has no 'Nothing'"),
    ):
        with pytest.raises(ValueError, match=f"agents.environment={kind} .*config is .*{message}"):
            verl_check(kind, section, tmp_path, f"class_name: {name}")
