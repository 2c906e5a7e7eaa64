"""Templates are filled, and values are quoted for the shell."""

import jinja2
import pytest

from launch.text import TEMPLATES, render


def test_a_missing_value_is_an_error() -> None:
    assert sorted(path.name for path in TEMPLATES.glob("*.jinja")) == [
        "kuberay_doctor.sh.jinja",
        "kuberay_job.sh.jinja",
        "kuberay_log.sh.jinja",
        "kuberay_stop.sh.jinja",
        "local.sh.jinja",
        "skypilot.sh.jinja",
        "slurm.sh.jinja",
    ]
    with pytest.raises(jinja2.UndefinedError):
        render("slurm.sh.jinja")
