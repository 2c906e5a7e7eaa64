"""Kinds are known, their options are read, and a user's own class is an environment."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.agents.environments.adapters import (
    ADAPTERS,
    ENTRY_POINTS,
    check_options,
    find_adapter,
    is_program,
    load,
)
from mcore_rl.agents.environments.check import check
from mcore_rl.agents.environments.gymnasium_env import GymnasiumEnvironment, GymnasiumOptions
from mcore_rl.agents.environments.worker_process import EnvironmentOptions
from tests.agents.environments import episodes
from tests.agents.environments.episodes import Countdown

COUNTDOWN = f"{episodes.HERE}:Countdown"


def test_every_kind_has_its_class_and_options():
    for kind in ADAPTERS:
        make, make_options = load(kind)
        verbs = ["run"] if is_program(kind) else ["reset", "step", "close"]
        assert all(callable(getattr(make, verb)) for verb in verbs), kind
        assert make_options.__module__ == make.__module__
    assert load("gymnasium") == (GymnasiumEnvironment, GymnasiumOptions)


def test_a_users_class_takes_its_options_as_keywords():
    make, make_options = load(COUNTDOWN)
    made = make(make_options(turns=5))
    assert type(made).__name__ == Countdown.__name__ and made.left == 5


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("gymnasum", {}, "no environment of kind 'gymnasum': it is one of gymnasium, "),
        ("gymnasium", {"id": "x", "seeed": 1}, "does not read the options seeed: it reads id, "),
        ("gymnasium", {}, "needs the options id"),
        ("gymnasium", {"id": "x", "max_steps": -1}, "max_steps -1"),
        (COUNTDOWN, {"turn": 1}, "does not read the options turn: it reads turns"),
        ("json:JSONDecoder", {}, "is no environment: it has no reset, step, close"),
    ],
)
def test_wrong_kinds_and_options_are_named(kind, options, text):
    with pytest.raises(ValueError, match=text):
        check_options(kind, options)


def test_the_options_of_a_users_class_are_good_if_it_reads_them():
    check_options(COUNTDOWN, {"turns": 2})
    check_options(COUNTDOWN, {})


SUMS = """
from dataclasses import dataclass

from mcore_rl.agents.environments.adapters import Adapter
from mcore_rl.agents.environments.environment import Start, Step

ADAPTER = Adapter("sums_of_mine", "Sums", "SumsOptions")


@dataclass(frozen=True)
class SumsOptions:
    worth: float = 1.0


class Sums:
    def __init__(self, options):
        self.options = options

    def reset(self, task):
        return Start([{"role": "user", "content": "2 + 2"}])

    def step(self, message):
        return Step(reward=self.options.worth * (message["content"] == "4"), done=True)

    def close(self):
        pass
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the package sums-of-mine, as pip does: a module and the metadata beside it."""
    (tmp_path / "sums_of_mine.py").write_text(SUMS)
    metadata = tmp_path / "sums_of_mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sums-of-mine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[{ENTRY_POINTS}]\nsums = sums_of_mine:ADAPTER\nno_adapter = sums_of_mine:SumsOptions\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    find_adapter.cache_clear()
    sys.modules.pop("sums_of_mine", None)


def test_an_installed_package_adds_an_environment(installed: Path) -> None:
    make, make_options = load("sums")
    environment = make(make_options(worth=0.5))
    assert environment.reset({}).messages == [{"role": "user", "content": "2 + 2"}]
    assert environment.step({"content": "4"}).reward == 0.5
    assert not is_program("sums")
    with pytest.raises(ValueError, match="does not read the options wort: it reads worth"):
        check_options("sums", {"wort": 1})
    with pytest.raises(ValueError, match=r"cartpole.*it is one of gymnasium, .*, no_adapter, sums"):
        check_options("cartpole", {})


def test_workers_find_the_environment_of_an_installed_package(installed: Path) -> None:
    variables = {"PYTHONPATH": str(installed)}
    check(EnvironmentOptions("sums", {"worth": 2.0}, variables=variables))
    with pytest.raises(ValueError, match="does not read the options wort"):
        check(EnvironmentOptions("sums", {"wort": 2.0}, variables=variables))


def test_entry_points_that_name_no_adapter_or_two_are_refused(installed: Path) -> None:
    with pytest.raises(ValueError, match="sums_of_mine:SumsOptions, a type: it has to be an Adap"):
        load("no_adapter")
    second = installed / "other-1.0.dist-info"
    second.mkdir()
    (second / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (second / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\nsums = other:ADAPTER\n")
    with pytest.raises(ValueError, match="several packages have an environment 'sums': other:"):
        load("sums")
