"""The probe names what is missing and what is wrong."""

import pytest

from mcore_rl.agents.environments import check
from mcore_rl.agents.environments.check import is_there, list_problems
from tests.agents.environments import episodes


def test_modules_are_found_without_importing_them():
    assert is_there("json.decoder") and is_there("wsgiref")
    assert not is_there("no_such_package") and not is_there("no_such_package.inner")


def test_missing_modules_come_first():
    assert list_problems("tools", {}, ["json", "no_such_package"]) == ["it has no no_such_package"]


def test_a_python_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(check, "OLDEST_PYTHON", (9, 0))
    (text,) = list_problems("tools", {}, [])
    assert text.startswith("it is Python 3.")


@pytest.mark.parametrize(
    ("options", "found"),
    [({"turns": 1}, []), ({"turn": 1}, ["does not read the options turn"])],
)
def test_options_are_checked(options, found):
    texts = list_problems(f"{episodes.HERE}:Countdown", options, [])
    assert len(texts) == len(found)
    assert all(part in text for part, text in zip(found, texts, strict=True))
