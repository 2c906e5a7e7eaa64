"""Templates are filled, and values are quoted for the shell."""

import jinja2
import pytest

from launch.text import TEMPLATES, render


def test_a_missing_value_is_an_error() -> None:
    assert sorted(path.name for path in TEMPLATES.glob("*.jinja")) == [
        "local.sh.jinja",
        "slurm.sh.jinja",
    ]
    with pytest.raises(jinja2.UndefinedError):
        render("slurm.sh.jinja")
